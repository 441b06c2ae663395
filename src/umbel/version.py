"""The version of Umbel: the one place where it is written."""

VERSION = "0.3.0"
