"""One Spark for all tests of the pipeline: starting it costs more than most of them."""

import logging
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from umbel.pipeline.session import TESTS, spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Py4J tells of connections that it closes when Python ends, and there is no log any more.
    logging.getLogger("py4j").setLevel(logging.ERROR)
    work = tmp_path_factory.mktemp("spark")
    with spark_session(None, lake_bytes=0, work_folder=work, conf=TESTS) as session:
        yield session
