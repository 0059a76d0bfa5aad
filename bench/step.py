"""The launches of one verify step, scheduled: a layer's attention, the acceptance, a layer's commit."""

from __future__ import annotations

from draft_verify.reference.emulator.schedule import Schedule, schedule

from .programs import programs_of
from .shapes import cases

# operation -> what must be equal in the case of the quick grid that is taken
LAUNCHES = {
    "verify_attention": ("BHDS", {"B": 1, "T": 8, "S": 8192}),
    "rejection_sampling": ("token", {"B": 1, "T": 8, "V": 151_936}),
    "commit_window": ("BHDS", {"B": 1, "T": 8, "layers": 1}),
}
STEP = (
    "One layer's verify_attention (8 heads on one key/value head, T = 8, 8192 slots), rejection_sampling over 151,936 "
    "tokens and one layer's commit_window (8 key/value heads), one sequence, one physical core"
)


def step_schedules() -> dict[str, list[Schedule]]:
    """By operation, the schedules of its launches."""
    grid = cases(quick=True)
    chosen = {
        operation: next(
            case
            for case in grid
            if case.operation == operation and case.variant == variant and shape.items() <= case.shape.items()
        )
        for operation, (variant, shape) in LAUNCHES.items()
    }
    return {
        operation: [schedule(program) for program in programs_of(case, lnc=1)] for operation, case in chosen.items()
    }


def step_trace(schedules: dict[str, list[Schedule]]) -> dict:
    """All launches one after another in the trace event format, one process each."""
    events, start = [], 0.0
    for process, (operation, launches) in enumerate(schedules.items()):
        for launch in launches:
            for event in launch.trace()["traceEvents"]:
                event = event | {"pid": process}
                if "ts" in event:
                    event["ts"] += start * 1e6
                if event["name"] == "process_name":
                    event["args"] = {"name": operation}
                events.append(event)
            start += launch.makespan
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def step_spans(schedules: dict[str, list[Schedule]]) -> list[tuple[str, str, float, float]]:
    """(operation, engine, start, end) of every instruction, microseconds; all DMA engines as one."""
    spans, start = [], 0.0
    for operation, launches in schedules.items():
        for launch in launches:
            for span in launch.cores[0]:
                engine = "dma" if span.lane.startswith("dma") else span.lane
                spans.append((operation, engine, (start + span.start) * 1e6, (start + span.end) * 1e6))
            start += launch.makespan
    order = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")
    return sorted(spans, key=lambda span: (list(schedules).index(span[0]), order.index(span[1]), span[2]))
