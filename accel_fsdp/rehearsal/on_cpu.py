"""`accel-fsdp launch --cpu`: runs a job on CPU processes, and then shows what each rank held."""

import os
from collections.abc import Callable, Sequence

from accel_fsdp import console, ranks
from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.rehearsal import blame, drawn_rows, janitor, verdict, without_gpu
from accel_fsdp.rehearsal.job import left_alone

OTHERWISE = "on GPUs the script would do the same, so what check and plan say of this YAML doesn't hold for it"
INTERRUPTED = 130
"""The exit code after Ctrl-C, without a measurement."""


def measured(job: JobConfig, launch: Callable[[], int], experts: int = 1) -> int:
    """Launches the job and shows what its ranks held, by unit; returns its exit code, or 1 if the YAML differs.

    Rows of the data that several ranks, or no rank, train on are a failure too. `experts`: the expert-parallel size.
    """
    with janitor.folder() as folder:
        os.environ |= janitor.mark(folder) | {ranks.EVENTS: str(folder), "CUDA_VISIBLE_DEVICES": ""}
        code = launch()
        if code == INTERRUPTED:
            return code
        events = ranks.read(folder)
    holdings = ranks.holdings(events)
    _show_cause(events)
    if gpu_calls := without_gpu.taken(events):
        console.say(gpu_calls)
    if not holdings:
        console.say("no model was trained, so nothing was measured", style="yellow")
        return code
    rows = verdict.table(holdings)
    console.show_table(verdict.TITLES, rows, [""] * len(rows), to_stderr=True)
    ranks_in_all = job.number("num_processes") or len(holdings)
    classes = verdict.repeated(next(iter(holdings.values())))
    expected = verdict.of_job(job, ranks_in_all, job.number("num_machines") or 1, classes, experts)
    differences = list(blame.differences(expected, holdings, events))
    for difference in differences:
        key = "" if difference.key == blame.SCRIPT else f" ({difference.key})"
        _show(difference, f"not what the YAML asks for: {difference.what}{key}", OTHERWISE)
    mistakes = list(drawn_rows.find(events))
    for mistake in mistakes:
        _show(mistake, mistake.what, "the model is trained on other rows, or in another order, than the script intends")
    return code or int(bool(differences or mistakes))


def _show(failure: blame.Failure, what: str, why: str) -> None:
    fix = f"{failure.line}: {failure.fix}" if failure.line else failure.fix
    console.say(str(UserError(what, why=why, fix=fix)), style="red", lines=True)


def _show_cause(events: Sequence[ranks.RankEvent]) -> None:
    """Prints below the tracebacks why a rank's collective ended, or a fix for the rank that failed first."""
    if hang := left_alone(events):
        failure = blame.of_hang(hang, events)
        why = "the ranks that have ended closed their connections, and the others' collectives failed"
        console.say(str(UserError(failure.what, why=why, fix=failure.fix)), lines=True)
        return
    failed = next((event.content for event in events if event.kind == "failed"), None)
    if failed and (fix := without_gpu.instead(failed["error"])):
        console.say(f"{failed['line']}: {fix}", style="red")
