from tests.pools.host import make_job
from umbel.pools.prefork.messages import ToChild, batch_frames
from umbel.wire.frames import FrameReader, JobBatch


def test_a_batch_is_one_frame() -> None:
    jobs = [make_job(number) for number in range(3)]
    reader: FrameReader[ToChild] = FrameReader(ToChild)
    assert reader.feed(bytes(batch_frames(7, jobs))) == [JobBatch(7, jobs)]


def test_a_batch_too_large_for_a_frame_goes_job_by_job_under_the_same_number() -> None:
    jobs = [make_job(number, "return", "x" * 100) for number in range(3)]
    reader: FrameReader[ToChild] = FrameReader(ToChild)
    frames = reader.feed(bytes(batch_frames(7, jobs, max_bytes=200)))
    assert frames == [JobBatch(7, [job]) for job in jobs]
