"""The linter's rules, as rows of a table, with the engine that runs them."""

from accel_fsdp.linter.rules import arguments, engine, fsdp, keys, launch, mesh, model, script, values
from accel_fsdp.linter.rules.engine import RULES, Finding, Rule, Severity, locate, repair, run
from accel_fsdp.linter.rules.keys import SECTIONS
from accel_fsdp.linter.rules.subject import ScriptFacts, Subject

for module in (keys, values, fsdp, mesh, launch, model, arguments, script):
    engine.add(*module.ROWS)

__all__ = ["RULES", "SECTIONS", "Finding", "Rule", "ScriptFacts", "Severity", "Subject", "locate", "repair", "run"]
