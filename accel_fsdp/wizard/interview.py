"""Settles the questions of `questions.py` by flags and defaults; `asking.py` asks the remaining ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import Any

from accel_fsdp import console, models
from accel_fsdp.command_line import parse_command_line
from accel_fsdp.config import DEFAULT_PORT, EXPERT_FLAG, script_arguments, size_key
from accel_fsdp.errors import UsageError, UserError, joined
from accel_fsdp.hardware import MachineFacts, host
from accel_fsdp.models import ModelFacts, remote_code
from accel_fsdp.units import parameters
from accel_fsdp.wizard import recommended, to_yaml, validation
from accel_fsdp.wizard.answers import MESH, Answers, Context
from accel_fsdp.wizard.presets import MODEL as PRESET_MODEL
from accel_fsdp.wizard.questions import QUESTIONS, Question, settle, store, to_answers

RANKS = ("num_processes", *MESH)
ABOUT_RANKS = ("AF316", "AF329", "AF330", "AF333", "AF402", "AF516", "AF517", "AF518", "AF519")
"""The answers about ranks, and the rules of `accel-fsdp check` that judge them together."""
WITHOUT_MODEL = ""
"""The answer where no model is needed: the layer class is named, or a file is edited."""


@dataclass
class Interview:
    """The answers so far: `flags`, which are never replaced, and `given`, also with those of a preset or file.

    `fixed` are the fields that are never asked, `asked` those answered in the terminal, the latest last.
    """

    flags: Mapping[str, str]
    given: dict[str, Any]
    fixed: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)

    def settled(self, until: str | None = None) -> Context:
        """All answers, or those before the question `until`; missing ones get their defaults.

        Given answers that a question rejects are removed from `given`, unless they are flags.
        """
        context = Context(given={}, wished=self.given)
        for question in takewhile(lambda question: question.field != until, QUESTIONS):
            if question.field == "gpus" and "gpus" not in self.given:
                context = replace(context, detected=_machine())
            context = self._settle(question, context)
        return context

    def _settle(self, question: Question, context: Context) -> Context:
        name, answer, applies = question.field, self.given.get(question.field), question.applies(context)
        if not applies and name in self.flags:
            what, why = f"{question.flag} has no effect", f"it needs {question.needs}"
            raise UsageError(what, why=why, fix=f"leave out {question.flag}, or change what it needs")
        model = self.given.get("model", WITHOUT_MODEL if "layer_class" in self.flags else None)
        needs_none = model == WITHOUT_MODEL and "model" not in self.flags
        if not applies or (needs_none and (name == "model" or (name == "layer_class" and not answer))):
            return store(question, context, question.default(context)[0])
        if name in self.given:
            try:
                settled = judged(question, settle(question, context, answer))
                return self._with_model(settled) if name == "model" else settled
            except UserError as error:
                if name in self.flags or name == "model":
                    raise
                del self.given[name]
                warn(f"note: {joined(error.what, error.why)}; going on with the default")
        return judged(question, settle(question, context, question.default(context)[0]))

    def _with_model(self, context: Context) -> Context:
        try:
            return replace(context, model=read_model(context["model"]))
        except UserError as error:
            if "layer_class" not in self.given:
                raise type(error)(error.what, why=error.why, fix=f"{error.fix}; or --layer-class NAME") from error
            _warn_once(f"note: {joined(error.what, 'going on with the given layer class, unchecked')}")
            if isinstance(error, remote_code.NeedsCode):
                _warn_once("note: train/sft.py takes such a model with --trust_remote_code alone; read its code first")
            return context


def judged(question: Question, context: Context) -> Context:
    """Refuses an answer about ranks that `accel-fsdp check` finds fault with in the YAML of the answers so far."""
    answers = Answers(**{"main_process_port": DEFAULT_PORT, **context.given})
    if question.field not in RANKS or (question.field in MESH and getattr(answers, question.field) == 1):
        return context
    if question.field in ("tp", "ep") and context.model and context.model.auto_class != models.CAUSAL:
        what, why = f"{question.flag} for {context.model.auto_class}", "train/sft.py alone divides"
        raise UserError(what, why=why, fix=f"{question.flag} 1")
    from accel_fsdp.linter.rules import RULES, Subject, run

    arguments = parse_command_line(script_arguments("\n".join(to_yaml.header(answers))))
    subject = Subject(to_yaml.to_mapping(answers), args=arguments, model=context.model, uses_sft=True)
    for finding in run(subject, {code: RULES[code] for code in ABOUT_RANKS}):
        fix = finding.fix
        for key, flag in ((EXPERT_FLAG, "--ep"), (f"{size_key('tp')}:", "--tp"), ("num_processes:", "--num-processes")):
            fix = fix.replace(key, flag)
        raise UserError(f"{question.flag} {context[question.field]}: {finding.what}", why=finding.why, fix=fix)
    return context


def interview(flags: Mapping[str, str], given: Mapping[str, Any], defaults: bool) -> Interview:
    """Settles every question: by a flag, a preset or a file, else by its default."""
    session = Interview(flags, {**given, **flags})
    if not defaults:
        context = replace(session, given={"model": PRESET_MODEL, **session.given}).settled()
        if unanswered := [q.flag for q in QUESTIONS if q.is_open(context) and q.field not in session.given]:
            what, why = "this is not a terminal, so nothing can be asked", "unanswered: " + " ".join(unanswered)
            raise UsageError(what, why=why, fix="--yes takes the defaults (it needs --model); or give these flags")
    return session


def answers(session: Interview) -> Answers:
    return to_answers(session.settled())


def warnings(session: Interview) -> tuple[str, ...]:
    """Cautions and the plan's objections to the answers of a finished interview, line by line."""
    context = session.settled()
    lines = [f"warning: {caution}" for caution in validation.cautions(context)]
    if context["num_machines"] > 1 and not context["main_process_ip"]:
        asked = "the job file of accel-fsdp script asks the cluster for it; else give --main-process-ip"
        lines.append(f"note: no main_process_ip: {asked}")
    job = recommended.verdict(context)
    if job and not job.fits:
        lead = "this leaves too little free memory" if job.verdict == "tight" else "this doesn't fit"
        lines.append(f"warning: {lead}: {job.refused or f'it {job.words}'}; accel-fsdp plan --config says what fits")
    return tuple(lines)


@cache
def _machine() -> MachineFacts:
    with console.waiting("Looking at this machine"):
        return host.read_machine()


@cache
def read_model(name: str) -> ModelFacts:
    """The facts about a model, built once."""
    with console.waiting(f"Building {name} on the meta device"):
        return models.read_model(name)


def warn(*lines: str) -> None:
    for line in lines:
        console.say(line, style="yellow", wrap=True)


_warn_once = cache(warn)


def introduce(name: str) -> None:
    """Says what a model is, and which of its layers are units."""
    model = read_model(name)
    layers = ", ".join(f"{layer.count} x {layer.name}" for layer in model.wrap_classes) or "no repeated layer"
    origin = f" ({model.origin})" if model.origin else ""
    size = parameters(model.parameters, model.language_parameters)
    console.say(f"{model.name}: {model.model_type}, {size}, {layers}{origin}", style="cyan", wrap=True)
