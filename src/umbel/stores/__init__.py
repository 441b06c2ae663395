"""Stores: the places where a lake's files are, a folder or S3, behind one interface (`interface.py`)."""
