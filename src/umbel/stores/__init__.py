"""Stores: where the files of a lake lie, a folder or S3, behind one interface (`interface.py`)."""
