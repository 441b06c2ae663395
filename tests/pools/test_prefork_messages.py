from tests.pools.host import make_job
from umbel.pools.prefork.links import batch_frames
from umbel.pools.prefork.messages import ToChild
from umbel.wire.frames import FrameReader, JobBatch


def test_a_batch_is_one_frame() -> None:
    jobs = [make_job(number) for number in range(3)]
    reader: FrameReader[ToChild] = FrameReader(ToChild)
    frames, unfit = batch_frames(7, jobs)
    assert reader.feed(b"".join(frames)) == [JobBatch(7, jobs)]
    assert not unfit


def test_a_batch_too_large_for_a_frame_goes_job_by_job_under_the_same_number() -> None:
    jobs = [make_job(number, "return", "x" * 100) for number in range(3)]
    reader: FrameReader[ToChild] = FrameReader(ToChild)
    frames, unfit = batch_frames(7, jobs, max_bytes=200)
    assert reader.feed(b"".join(frames)) == [JobBatch(7, [job]) for job in jobs]
    assert not unfit


def test_a_job_that_cannot_be_written_is_left_out_with_the_reason() -> None:
    """N1."""
    jobs = [
        make_job(1),
        make_job(2, hard_limit_s=10**30),
        make_job(3, task="\udcff"),
        make_job(4, "return", "x" * 500),
        make_job(5),
    ]
    reader: FrameReader[ToChild] = FrameReader(ToChild)
    frames, unfit = batch_frames(7, jobs, max_bytes=300)
    assert reader.feed(b"".join(frames)) == [JobBatch(7, [jobs[0]]), JobBatch(7, [jobs[4]])]
    assert list(unfit) == [2, 3, 4]
    assert "cannot be sent to a child process: OverflowError" in unfit[2]
    assert "can't encode character" in unfit[3]
    assert "over the limit of 300" in unfit[4]
