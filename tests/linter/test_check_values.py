"""Values that `check` finds fault with, and what Accelerate's own launcher and plugins do with them."""

import dataclasses
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import reference_docs
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import (
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    launch,
)
from accelerate.utils.dataclasses import FP8BackendType, TERecipeKwargs
from checking import DS, SIZE, V1, V2, codes_of, finding, findings, repaired, subject
from conftest import accel_fsdp
from jsonschema import Draft7Validator

from accel_fsdp import linter
from accel_fsdp.config import BY_NAME, MISNAMED, known_fields, yaml_file
from accel_fsdp.config.schema import DYNAMO_FIELDS, FP8_FIELDS
from accel_fsdp.launch import launcher as jobs
from accel_fsdp.linter.rules import run

EIGHT = V2.replace("num_processes: 2", "num_processes: 8")
DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
ONE = "distributed_type: 'NO'\nmixed_precision: 'no'\nnum_processes: 1\n"
ZERO = DS + "  zero_stage: 2\n"
EACH = "  fsdp_cpu_ram_efficient_loading: false\n  fsdp_sync_module_states: false\n"
READ_BY_ALL = V1 + EACH
DS_FILE = DS.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: {}\n"
TWO = "num_machines: 2\nmain_process_ip: localhost\nmachine_rank: 1\n"


SCHEMA = Draft7Validator(reference_docs.schema())


def mesh(**sizes: int | str) -> str:
    return "parallelism_config:\n" + "".join(f"  parallelism_config_{k}_size: {v}\n" for k, v in sizes.items())


ROWS = EIGHT + mesh(cp=2, dp_shard=4)


def accelerate_takes(text: str, folder: Path) -> dict[str, str]:
    """The ranks' variables, after the plugins that read them have been made; raises what Accelerate raises."""
    path = folder / "config.yaml"
    path.write_text(text)
    words = ["--config_file", str(path), str(Path(__file__))]
    args, defaults, from_config = _validate_launch_command(launch_command_parser().parse_args(words))
    args.main_process_port = args.main_process_port or 0
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = launch.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        environment = launch.prepare_multi_gpu_env(args)
    else:
        environment = launch.prepare_simple_launcher_cmd_env(args)[1]
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TorchDynamoPlugin()
        if args.use_fsdp:
            FullyShardedDataParallelPlugin()
        if args.use_deepspeed:
            DeepSpeedPlugin()
        if "ACCELERATE_USE_PARALLELISM_CONFIG" in environment:
            ranks = SimpleNamespace(
                multi_device=args.multi_gpu,
                num_processes=args.num_processes,
                is_fsdp2=args.use_fsdp,
                distributed_type="FSDP",
                is_main_process=False,
            )
            ParallelismConfig()._validate_accelerator(ranks)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


REFUSED: dict[str, tuple[str, str]] = {
    "port in quotes": ("AF211", EIGHT + 'main_process_port: "29501"\n'),
    "machines in quotes": ("AF211", EIGHT + 'num_machines: "1"\n'),
    "machines without a value": ("AF211", EIGHT + "num_machines:\n"),
    "processes in quotes, two machines": ("AF211", EIGHT.replace("es: 8", "es: '8'") + TWO),
    "processes in quotes, no engine": ("AF211", ONE.replace("es: 1", "es: '1'")),
    "mesh in quotes": ("AF211", EIGHT + "parallelism_config: {parallelism_config_cp_size: '8'}\n"),
    "port beyond the last": ("AF212", EIGHT + "main_process_port: 99999\n"),
    "port below the first": ("AF212", EIGHT + "main_process_port: -1\n"),
    "no such backend": ("AF203", EIGHT + "dynamo_config: {dynamo_backend: INDUCTR}\n"),
    "a mesh's backend in capitals": ("AF203", ROWS + "  parallelism_config_cp_backend: TORCH\n"),
    "a mesh's strategy in capitals": ("AF203", ROWS + "  parallelism_config_cp_comm_strategy: ALLTOALL\n"),
    "no such version": ("AF203", EIGHT.replace("version: 2", "version: 3")),
    "a version as a float": ("AF203", EIGHT.replace("version: 2", "version: 2.0")),
    "no such strategy": ("AF203", READ_BY_ALL + "  fsdp_sharding_strategy: ZERO3\n"),
    "offload without a value": ("AF202", READ_BY_ALL + "  fsdp_offload_params:\n"),
    **{
        f"a size of {number}": ("AF205", SIZE + EACH + f"  fsdp_min_num_params: {number}\n")
        for number in ("1e8", "1.0e8", "1.0e+8")  # YAML 1.1 makes it text or a float
    },
    "a strategy for resharding": ("AF304", EIGHT + "  fsdp_reshard_after_forward: FULL_SHARD\n"),
    "local state dicts": ("AF309", EIGHT + "  fsdp_state_dict_type: LOCAL_STATE_DICT\n"),
    "precision no": ("AF201", EIGHT.replace("'no'", "no")),
    "a number of a GPU": ("AF207", DDP + "gpu_ids: 0\n"),
    "backend no": ("AF201", EIGHT + "dynamo_config: {dynamo_backend: no}\n"),
    "use_cpu without an engine": ("AF204", ONE + "use_cpu: 1000\n"),
    "graph": ("AF204", EIGHT + "dynamo_config: {dynamo_backend: eager, use_fullgraph: maybe}\n"),
    "mesh without a value": ("AF202", EIGHT + "parallelism_config: {parallelism_config_dp_shard_size: }\n"),
    "cp's backend without a value": ("AF202", EIGHT + mesh(dp_shard=8) + "  parallelism_config_cp_backend:\n"),
    "replicas without a value, FSDP1": ("AF202", READ_BY_ALL + mesh(dp_replicate="")),
    "shards without a value, DDP": ("AF202", DDP + mesh(dp_shard="")),
    "sp without a value, DeepSpeed": ("AF202", ZERO + mesh(sp="")),
    "graph without a value": ("AF202", EIGHT + "dynamo_config: {dynamo_backend: eager, use_fullgraph: }\n"),
    "clipping none": ("AF213", ZERO + "  gradient_clipping: none\n"),
    "clipping true": ("AF213", ZERO + "  gradient_clipping: true\n"),
    "file and stage": ("AF324", ZERO.replace("mixed_precision: bf16\n", "") + "  deepspeed_config_file: FILE\n"),
    "file and precision": ("AF324", DS + "  deepspeed_config_file: FILE\n"),
    "replicas and tp, DDP": ("AF316", DDP + mesh(dp_replicate=2, tp=4)),
    "replicas and tp": ("AF316", EIGHT + mesh(dp_replicate=2, tp=4)),
    "size 0": ("AF316", DDP + mesh(dp_replicate=0)),
    "size 0, FSDP1": ("AF315", READ_BY_ALL + mesh(dp_shard=0)),
    "cp and sp": ("AF316", EIGHT + mesh(cp=2, sp=4)),
    "nothing to shard over": ("AF316", EIGHT + mesh(tp=8)),
    "replicas only": ("AF316", EIGHT + mesh(dp_replicate=8)),
    "another total, DDP": ("AF316", DDP + mesh(tp=4)),
    "another total": ("AF316", EIGHT + mesh(dp_shard=4)),
    "one GPU for DDP": ("AF413", DDP + "gpu_ids: '0'\n"),
    "bare NO without processes": ("AF208", "distributed_type: NO\nmixed_precision: 'no'\n"),
    "NO with -1 processes": ("AF401", ONE.replace("es: 1", "es: -1")),
    "no engine": ("AF101", EIGHT.partition("\n")[2]),
    "a key of no version": ("AF102", EIGHT + "fdsp_config: {}\n"),
    "a file of another tool": ("AF112", "base_model: m\ndatasets: []\nfsdp_config: {fsdp_version: 2}\n"),
    "a file that is elsewhere": ("AF217", DS_FILE.format("a.json")),
    "checkpoints on the host, FSDP1": ("AF313", V1 + "  fsdp_activation_checkpointing_offload: true\n"),
    "no checkpoints, on the host": ("AF313", V2 + "  fsdp_activation_checkpointing_offload: true\n"),
}


@pytest.mark.pain("P41", "P42", "P47", "P48", "P63", "P64", "P66", "P67", "P68", "P71")
@pytest.mark.parametrize("name", REFUSED)
def test_what_accelerate_stops_at_is_found(name: str, tmp_path: Path) -> None:
    code, text = REFUSED[name]
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    text = text.replace("FILE", str(tmp_path / "ds.json"))
    assert code in {finding.code for finding in findings(text, tmp_path) if finding.severity == "error"}
    with pytest.raises((ValueError, TypeError, OverflowError, AttributeError, KeyError)) as stopped:
        accelerate_takes(text, tmp_path)
    said = f"{type(stopped.value).__name__}: {stopped.value}".lower()
    quoted = finding(code, text, tmp_path).why.partition("stops: ")[2].lower()
    assert quoted in said or code in ("AF208", "AF316")  # which say it in other words


UNREAD: list[tuple[str, str, str]] = [
    *(("AF105", f"{EIGHT}parallelism_config: {{{axis}_size: 2}}\n", EIGHT + mesh(tp=1)) for axis in ("dp_shard", "tp")),
    ("AF105", EIGHT + "parallelism_config: {dp_replicate_size: 2}\n", EIGHT + mesh(tp=1)),
    ("AF106", DDP + "dynamo_config: INDUCTOR\n", DDP),
    ("AF111", EIGHT + "debug: false\ndebug: true\n", EIGHT + "debug: true\n"),
    ("AF301", READ_BY_ALL.replace("  fsdp_version: 1\n", ""), READ_BY_ALL),
    *(("AF314", f"{text}fsdp_config: {{fsdp_version: 2}}\n", text) for text in (DDP, ONE, ZERO)),
    ("AF326", EIGHT + "fp8_config: {backend: TE}\n", EIGHT),
    *(("AF405", f"use_cpu: true\n{text}", text) for text in (EIGHT, DDP, ZERO)),
    ("AF417", ONE.replace("es: 1", "es: 8"), ONE),
]


@pytest.mark.pain("P06", "P08", "P41", "P83")
@pytest.mark.parametrize(("code", "text", "same"), UNREAD)
def test_what_accelerate_does_not_read_is_found(code: str, text: str, same: str, tmp_path: Path) -> None:
    assert code in codes_of(subject(text, doubled=yaml_file.doubled_keys(text)))
    assert code not in codes_of(subject(same))
    read, plain = (accelerate_takes(content, tmp_path) for content in (text, same))
    assert {name: value for name, value in read.items() if not name.startswith("MASTER_")} == plain


NO_WRAP = EIGHT.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP")
TAKEN: dict[str, str] = {
    "processes in quotes": EIGHT.replace("es: 8", "es: '8'"),
    "every GPU of the machine": EIGHT.replace("es: 8", "es: gpu"),
    "every GPU of the machine, DDP": DDP.replace("es: 8", "es: auto"),
    "port in quotes, one process": ONE + "main_process_port: '29501'\n",
    "last port": EIGHT + "main_process_port: 65535\n",
    "backend in small letters": EIGHT + "dynamo_config: {backend: inductor, mode: max-autotune}\n",
    "backend without a value": EIGHT + "dynamo_config: {backend: }\n",
    "old top-level backend": EIGHT + "dynamo_backend: INDUCTOR\n",
    "clipping in quotes": ZERO + "  gradient_clipping: '1.0'\n",
    "clipping AUTO": ZERO + "  gradient_clipping: AUTO\n",
    "tp alone under DDP": DDP + mesh(tp=8),
    "replicas under DDP": DDP + mesh(dp_replicate=8),
    "a mesh of size 1": EIGHT + mesh(dp_replicate=1),
    "details of a mesh without values": EIGHT + mesh(dp_shard=8) + "  parallelism_config_cp_comm_strategy:\n"
    "  parallelism_config_sp_seq_length:\n",
    "sizes without a value, one process": ONE + mesh(dp_shard=""),
    "processes without a value, one process": ONE.replace("es: 1", "es:"),
    "shards and tp": EIGHT + mesh(dp_shard=4, tp=2),
    "a size": SIZE + EACH + "  fsdp_min_num_params: 100\n",
    "resharding": EIGHT + "  fsdp_reshard_after_forward: true\n",
    "state dict by number": EIGHT + "  fsdp_state_dict_type: 1\n",
    "state dict in small letters": EIGHT + "  fsdp_state_dict_type: full_state_dict\n",
    "file and launcher": DS_FILE.format("FILE") + "  zero3_init_flag: true\n",
    "a size that no policy reads": EIGHT + "  fsdp_min_num_params: 1e8\n",
    "classes that no policy reads": NO_WRAP.replace("LlamaDecoderLayer", "[Layer, Other]"),
    "an option without its prefix": EIGHT + "  offload_params: false\n",
    "a boolean in quotes": EIGHT + "  fsdp_offload_params: 'true'\n",
    "as many GPUs as processes": V2 + "gpu_ids: '3,4'\n",
    "checkpoints on the host": EIGHT + "  fsdp_activation_checkpointing: true\n"
    "  fsdp_activation_checkpointing_offload: true\n",
    **{f"{key}: 1000": f"{EIGHT}{key}: 1000\n" for key in ("use_cpu", "same_network", "enable_cpu_affinity")},
    **{f"{key}: 1000, one process": f"{ONE}{key}: 1000\n" for key in ("same_network", "enable_cpu_affinity")},
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_accelerate_takes_is_clean(name: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    text = TAKEN[name].replace("FILE", str(tmp_path / "ds.json"))
    accelerate_takes(text, tmp_path)
    assert [finding for finding in findings(text, tmp_path) if finding.severity == "error"] == []
    other = ("no policy reads", "in quotes", "without", "old top-level", "1000")  # what the docs' schema refuses
    assert any(word in name for word in other) or SCHEMA.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (DDP, {"dp_replicate": 4, "tp": 2}),
        (DDP, {"dp_shard": 8}),
        (DDP, {"tp": 4}),
        (EIGHT, {"dp_replicate": 4, "tp": 2}),
        (EIGHT, {"dp_replicate": 2, "cp": 4}),
        (EIGHT, {"dp_shard": -1, "tp": 2}),
        (EIGHT, {"tp": 8}),
        (EIGHT, {"tp": 3, "dp_shard": 2}),
        (EIGHT, {"dp_replicate": 8}),
        (EIGHT, {"cp": 2, "sp": 4}),
        (EIGHT, {"dp_shard": 4}),
        (ZERO.replace("stage: 2", "stage: 3"), {"sp": 3}),
    ],
)
def test_each_mesh_that_a_fix_names_is_taken(text: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """AF315 and AF316: the fix holds a whole mesh, or sizes of 1, and no other finding about the mesh follows."""
    text = text.replace("num_processes: 2", "num_processes: 8")
    fixes = [finding.fix for finding in run(subject(text + mesh(**sizes))) if finding.code in ("AF315", "AF316")]
    for fix in fixes[-1].split("; or "):
        named = {axis: int(size) for axis, size in re.findall(r"(\w+?)_size: (-?\d+)", fix)}
        renamed = {axis.removeprefix("parallelism_config_"): size for axis, size in named.items()}
        mended = (EIGHT if "distributed_type: FSDP" in fix else text) + mesh(**{**sizes, **renamed})
        processes = re.search(r"num_processes: (\d+)", fix)
        mended = mended.replace("num_processes: 8", processes[0]) if processes else mended
        if "DEEPSPEED" not in mended:  # it doesn't look at the product
            accelerate_takes(mended, tmp_path)
        assert not {"AF315", "AF316"} & codes_of(subject(mended)), fix


READ: list[tuple[str, str, str, str | None, str]] = [
    ("AF108", "  offload_params: false\n  fsdp_offload_params: true\n", "FSDP_OFFLOAD_PARAMS", "true", "wins: True"),
    ("AF108", "  fsdp_offload_params: false\n  offload_params: true\n", "FSDP_OFFLOAD_PARAMS", "true", "wins: True"),
    ("AF209", "debug: 'false'\n", "ACCELERATE_DEBUG_MODE", "true", "Accelerate reads any text as true"),
    *(("AF209", f"debug: {word}\n", "ACCELERATE_DEBUG_MODE", "true", "reads it as true") for word in ("1000", "maybe")),
    ("AF209", "debug: []\n", "ACCELERATE_DEBUG_MODE", None, "reads it as false"),
]


@pytest.mark.parametrize(("code", "lines", "variable", "taken", "why"), READ)
def test_what_accelerate_makes_of_a_value_is_said(
    code: str, lines: str, variable: str, taken: str | None, why: str, tmp_path: Path
) -> None:
    """A value that stops nothing is not AF204; what has a repair is then read as it was meant."""
    assert accelerate_takes(EIGHT + lines, tmp_path).get(variable) == taken
    reported = finding(code, EIGHT + lines, tmp_path)
    assert (reported.severity, reported.why.endswith(why)) == ("error" if code == "AF108" else "warning", True)
    assert "AF204" not in codes_of(subject(EIGHT + lines))
    assert bool(reported.edits) == ("'false'" in lines)
    if reported.edits:
        assert variable not in accelerate_takes(repaired(EIGHT + lines, tmp_path), tmp_path)


def test_a_list_of_ignored_modules_fits_no_module(tmp_path: Path) -> None:
    from accelerate.utils.fsdp_utils import get_parameters_from_modules
    from torch import nn

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    variable = accelerate_takes(EIGHT + "  fsdp_ignored_modules: [mlp, head]\n", tmp_path)["FSDP_IGNORED_MODULES"]
    named = nn.ModuleDict({"mlp": model, "head": nn.Linear(2, 2)})
    assert get_parameters_from_modules(variable, named, "cpu") == set()
    assert get_parameters_from_modules("mlp|head", named, "cpu") == set(named.parameters())
    with pytest.raises(Exception, match="nothing to repeat"):
        get_parameters_from_modules("*mlp", named, "cpu")
    assert "AF210" in codes_of(subject(V2 + "  fsdp_ignored_modules: '*mlp'\n"))
    assert "AF210" not in codes_of(subject(V2 + "  fsdp_ignored_modules: 'model\\.layers\\.0\\.mlp'\n"))


def test_dynamo_and_fp8_keys_are_accelerates_own() -> None:
    backends = {backend.value.lower() for backend in DynamoBackend}
    assert set(BY_NAME["dynamo_config", "dynamo_backend"].choices) == backends
    flags = vars(launch_command_parser().parse_args(["--config_file", "a", "b"]))
    dynamo = {field.key for field in DYNAMO_FIELDS}
    assert dynamo == {name for name in flags if name.startswith("dynamo_")}
    recipe = {f"fp8_{field.name.removeprefix('fp8_')}" for field in dataclasses.fields(TERecipeKwargs)}
    known = {field.key for field in FP8_FIELDS}
    assert known == recipe | {name for name in flags if name.startswith("fp8_")}
    assert set(BY_NAME["fp8_config", "fp8_backend"].choices) == {"AO", "TE", "MSAMP"}
    with pytest.raises(ValueError, match="te"):
        FP8BackendType("te")  # the launcher's own spelling: case matters
    assert set(MISNAMED.values()) <= known
    assert not set(MISNAMED) & set(flags)


@mock.patch("accelerate.utils.launch.is_fp8_available", new=mock.Mock(return_value=True))
@pytest.mark.parametrize(("key", "value"), [("amax_history_length", 16), ("amax_compute_algorithm", "max")])
def test_fp8_keys_that_accelerate_config_writes_in_vain(key: str, value: Any, tmp_path: Path) -> None:
    """AF103: red when the launcher reads what the questions of `accelerate config` write."""
    text = EIGHT.replace("'no'", "fp8") + f"fp8_config: {{backend: TE, {key}: {value}}}\n"
    name = f"ACCELERATE_{MISNAMED[f'fp8_{key}'].upper()}"
    assert accelerate_takes(text, tmp_path)[name] != str(value)
    assert [finding.code for finding in findings(text, tmp_path, fix=True) if finding.severity != "note"] == []
    assert accelerate_takes((tmp_path / "checked.yaml").read_text(), tmp_path)[name] == str(value)


BY_FLAG = {field.key: field for field in BY_NAME.values()}


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--mixed_precision", "fp16", "mixed_precision"),
        ("--num_processes", "4", "num_processes"),
        ("--num-processes", "4", "num_processes"),
        ("--fsdp_offload_params", "true", "fsdp_offload_params"),
        ("--dynamo_backend", "eager", "dynamo_backend"),
    ],
)
def test_a_launcher_flag_wins_over_the_file(flag: str, value: str, key: str, tmp_path: Path) -> None:
    text = EIGHT + "  fsdp_offload_params: false\ndynamo_config: {dynamo_backend: inductor}\n"
    (tmp_path / "config.yaml").write_text(text)
    words = [flag, value, "--config_file", str(tmp_path / "config.yaml"), "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert str(getattr(args, key)) == value
    (line := tmp_path / "args.sh").write_text(f"accelerate launch {flag} {value} train.py --num_machines 9\n")
    job = linter.read_subject(tmp_path / "config.yaml", linter.Sources(args=line))[0]
    assert str(job.section(BY_FLAG[key].section)[key]) == value
    assert "num_machines" not in job.values


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_gpus_that_are_not_there_cannot_be_counted(tmp_path: Path) -> None:
    (path := tmp_path / "a.yaml").write_text(EIGHT.replace("es: 8", "es: gpu"))
    finished = accel_fsdp("launch", "--cpu", path, __file__)
    assert (finished.code, "Traceback" in finished.output) == (1, False)
    assert "Cuda is not available" in finished.output


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mvapich", "mpich", "slurm", "nossh", ""])
def test_deepspeeds_own_launchers_need_a_hostfile_only(launcher: str, tmp_path: Path) -> None:
    text = "num_machines: 2\n" + ZERO + "  deepspeed_hostfile: hosts\n"
    text += f"  deepspeed_multinode_launcher: {launcher}\n" if launcher else ""
    assert "AF403" not in codes_of(subject(text))
    assert "AF403" in codes_of(subject(text.replace("  deepspeed_hostfile: hosts\n", "")))
    path = tmp_path / "a.yaml"
    path.write_text(text)
    args = jobs.launcher_args(path, Path(__file__), ())
    args.deepspeed_fields_from_accelerate_config, args.machine_rank = "", 1
    with mock.patch("accelerate.utils.launch.compare_versions", return_value=False):
        words, _ = launch.prepare_deepspeed_cmd_env(args)
    assert words[:3] == ["deepspeed", "--hostfile", "hosts"]
    assert "--master_addr" not in words


@pytest.mark.parametrize("section", ["fsdp_config", "parallelism_config", "dynamo_config"])
def test_the_schema_and_the_linter_agree_on_case(section: str) -> None:
    choices = [(key, choice) for key, field in known_fields(section).items() for choice in field.choices]
    assert choices
    for key, choice in choices:
        for text in (choice, choice.lower(), choice.upper(), choice.title()):
            content = {"distributed_type": "FSDP", section: {key: text}}
            clean = "AF203" not in codes_of(subject(yaml.safe_dump(content)))
            assert SCHEMA.is_valid(content) == clean, (key, text)


VERSION = V2.replace("version: 2", "version: {}") + "  fsdp_reshard_after_forward: false\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (V2.replace("FSDP", "fsdp"), {"AF203"}),
        *((V2.replace("fsdp_config:", section), {"AF102"}) for section in ("fsdp_confg:", "fsdp-config:")),
        (V2.replace("distributed_type:", "distributed_typ:"), {"AF102"}),
        (V2.replace("fsdp_version:", "fsdp_verion:"), {"AF103"}),
        (V2.replace("fsdp_config:", "fsdp_confg:").replace("fsdp_version", "fsdp_verion"), {"AF102", "AF103"}),
        *((VERSION.format(word), {"AF203"}) for word in ("2.0", "v2", "'2.0'", "fsdp2", "3", "-1")),
        (V2 + "  fsdp_reshard_after_forward: FULL_SHARD\n", {"AF304"}),
        (V2 + "  fsdp_reshard_after_forward: maybe\n", {"AF204"}),
    ],
)
def test_one_error_is_one_finding(text: str, found: set[str]) -> None:
    assert {finding.code for finding in run(subject(text)) if finding.severity != "note"} == found


@pytest.mark.parametrize("word", ["bf16", "BF16", "Fp16", "'NO'"])
def test_a_precision_in_any_case_is_the_same(word: str) -> None:
    """The launcher makes small letters of it."""
    text = V1.replace("es: 2", "es: 64")
    small, given = (codes_of(subject(text.replace("'no'", spelling))) for spelling in (word.lower(), word))
    assert given == small
    assert ("AF318" in given) == ("16" in word)
