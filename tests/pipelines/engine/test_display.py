"""What a person sees where output is a file: plain lines, without Ray's own chatter."""

import io

from rich.console import Console

from pipelines.engine.display import RunDisplay


def shown(*lines: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    with RunDisplay(console, width=8) as display:
        display.stage("pretrain", "RUNNING")
        for line in lines:
            display.line("pretrain", line)
        display.stage("pretrain", "SUCCEEDED", "abc[0]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_lose_colours_and_the_workers_prefix_and_keep_brackets() -> None:
    text = shown("\x1b[36m(RayTrainWorker pid=12, ip=127.0.0.1)\x1b[0m loss [1/2]")
    assert "pretrain  loss [1/2]\n" in text
    assert "abc[0]" in text


def test_the_libraries_own_lines_are_left_out_and_their_warnings_are_not() -> None:
    text = shown(
        "2026-11-21 09:13:29,146\tINFO job_manager.py:581 -- Runtime env is setting up.",
        "Running entrypoint for job x: exec python",
        "(RayTrainWorker pid=12) DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully",
        "(RayTrainWorker pid=12) DeepSpeed could not load an op",
    )
    assert [line.split("  ")[-1] for line in text.splitlines()[1:-1]] == ["DeepSpeed could not load an op"]


def test_progress_is_thinned_out_and_errors_are_not() -> None:
    text = shown(*(f"progress step {step}/9" for step in range(9)), *["error: x"] * 3)
    assert text.count("step") == 1
    assert text.count("error: x") == 3
