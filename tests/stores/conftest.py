"""S3 for the tests of stores."""

from tests.servers.s3 import s3, s3_lake, s3_server

__all__ = ["s3", "s3_lake", "s3_server"]
