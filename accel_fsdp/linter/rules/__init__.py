"""The linter's rules, one function each, with the engine that runs them."""

from accel_fsdp.linter.rules import (  # each registers its rules
    arguments,
    fsdp,
    keys,
    launch,
    machine,
    mesh,
    model,
    script,
    unused_sections,
    values,
)
from accel_fsdp.linter.rules.engine import RULES, Finding, Rule, ScriptFacts, Severity, Subject, locate, repair, run
from accel_fsdp.linter.rules.keys import SECTIONS

__all__ = [
    "RULES", "SECTIONS", "Finding", "Rule", "ScriptFacts", "Severity", "Subject", "arguments", "fsdp",
    "keys", "launch", "locate", "machine", "mesh", "model", "repair", "run", "script", "unused_sections", "values",
]  # fmt: skip
