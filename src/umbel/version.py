"""The version of Umbel, which is written only here."""

VERSION = "0.3.0"
