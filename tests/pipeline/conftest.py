"""One Spark for all tests of the pipeline: starting it costs more than most of them."""

import logging
import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.servers.s3 import s3, s3_lake, s3_server
from umbel.pipeline.engines import LAPTOP, spark_session

__all__ = ["s3", "s3_lake", "s3_server"]  # fixtures

TESTS = {
    **LAPTOP,
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
}
# What the transforms mean depends on.
MEANING = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.execution.useObjectHashAggregateExec": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}

# Each plan as it is, not compiled to Java first, which takes a third of the time of small tables. It is
# compiled in the soak, and where a test starts a Spark of its own: demo, killed stream, cluster.
SMALL = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
# What fails is tried again, as on a cluster.
AGAIN = {"spark.master": "local[2,4]"}
CONF = {**TESTS, **MEANING, **AGAIN, **({} if os.environ.get("UMBEL_SOAK") else SMALL)}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Py4J tells of connections that it closes when Python ends, and there is no log any more.
    logging.getLogger("py4j").setLevel(logging.ERROR)
    work = tmp_path_factory.mktemp("spark")
    with spark_session(None, work_folder=work, conf=CONF) as session:
        yield session
