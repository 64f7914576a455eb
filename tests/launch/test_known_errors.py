"""`doctor --explain`: real errors of torch, public reports, and what must not be taken for a cause."""

import json
import re
import sys
import time
from collections import Counter
from typing import Any

import pytest
from conftest import ROOT, Finished, run
from error_texts import verdict

from accel_fsdp.launch.doctor import known_errors
from accel_fsdp.launch.doctor.machine_errors import MACHINE_ERRORS
from accel_fsdp.launch.doctor.script_errors import SCRIPT_ERRORS

ERRORS = ROOT / "tests" / "launch" / "network_errors.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
REAL = {
    "interface": "no-such-interface",
    "unknown_name": "rendezvous",
    "loopback": "own-address",
    "port": "port-taken",
    "alone": "missing-ranks",
    "mesh": "mesh-without-shards",
}
PUBLIC: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "data" / "error_texts.json").read_text())["texts"]
MOST_WRONG = 0.02
SECONDS = 20


def explain(message: str) -> Finished:
    return run([sys.executable, "-m", "accel_fsdp", "doctor", "--explain", message])


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", REAL)
def test_a_real_message_is_explained(case: str) -> None:
    output = run([sys.executable, ERRORS, case]).output
    answer = explain(output[-2000:])
    assert answer.code == 0, output
    assert answer.output.startswith(f"{REAL[case]}\n")


def test_a_line_is_read_at_both_of_its_ends() -> None:
    """Patterns took time in the square of a line's length: 18 s for a hundred thousand letters, two hours for a log."""
    telling = "RuntimeError: No space left on device"
    filler, began = "a" * 1_000_000, time.process_time()
    named = known_errors.find(f"{telling} {filler}"), known_errors.find(f"{filler} {telling}")
    assert named == (known_errors.find(telling),) * 2 != (None, None)
    assert time.process_time() - began < SECONDS


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("case", "row"), {"skipped": "collective-timeout", "left": "gone"}.items())
def test_a_real_message_of_ranks_is_explained(case: str, row: str) -> None:
    output = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", ERRORS, case]).output
    first = next(line for line in output.splitlines() if "RuntimeError" in line)
    assert known_errors.find(first) == row, first


def test_a_message_of_torchrun_is_explained() -> None:
    words = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "nosuch.invalid:29500")
    output = run([*TORCHRUN, *words, "--rdzv-conf", "read_timeout=2", ERRORS, "alone"]).output
    assert "RendezvousConnectionError" in output
    assert known_errors.find(output[-2000:]) == "rendezvous"


@pytest.mark.slow
def test_the_rank_that_failed_first_is_the_cause() -> None:
    """torchrun ends rank 1 by SIGTERM, and by SIGKILL as it ignores that."""
    output = run([sys.executable, ERRORS, "impatient"]).output
    assert re.search(r"exitcode +: -9 ", output), output
    assert known_errors.find(output) == "wrong-layer-class"
    assert known_errors.find(output[output.index("FAILED") :]) is None


def test_a_cause_from_the_table_is_no_certainty() -> None:
    answer = explain("NCCL WARN Call to posix_fallocate failed : No space left on device").output
    assert re.search(r"^  often: /dev/shm is full", answer, flags=re.MULTILINE)


def test_a_symptom_is_said_before_what_is_often_behind_it() -> None:
    answer = explain("train.py FAILED\n  exitcode  : -9 (pid: 79468)").output
    assert answer.startswith("killed\n  means: a process was ended from outside, by SIGKILL\n  often: the memory")
    assert "means:" not in explain("No CUDA GPUs are available").output


def test_an_unknown_message() -> None:
    answer = explain("the printer is on fire")
    assert answer.code == 1
    assert "the message is unknown" in answer.output


@pytest.mark.parametrize(
    "message",
    [
        "BrokenPipeError: [Errno 32] Broken pipe",
        "socket has failed to listen on any local network address. bind to [::]:520 (errno: 13 - Permission denied)",
        "DistNetworkError: client socket has timed out after 600000ms while trying to connect to (PRIVATE_IP, PORT)",
        "RuntimeError: Connection reset by peer",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:410, unhandled system error, NCCL version 2.4.8",
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.29.7",
        "socket.gaierror: [Errno -2] Name or service not known",
        "W1123 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 74 closing signal SIGTERM",
        "INFO: world_size=1, local_rank 0\nKeyError: 'x'",
        "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded' thrown while requesting HEAD "
        "https://huggingface.co/gpt2/resolve/main/config.json\nRetrying in 1s [Retry 1/5].\nKeyError: 'x'",
        "[W1123 socket.cpp] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family",
        "[rank0]:[W1123 socket.cpp] [c10d] The client socket has failed to connect to [::]:29500\nKeyError: 'x'",
        "node1: NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nKeyError: 'loss'",
        "UserWarning: The devices used by this process are currently unknown.\nKeyError: 'loss'",
        "ValueError: error 802.1x",
        "EntryNotFoundError: 404 Client Error. Entry Not Found for url: "
        "https://huggingface.co/gpt2/resolve/main/a.json",
        "Downloading https://huggingface.co/gpt2/resolve/main/config.json 100%\nKeyError: 'labels'",
        "KeyError: 'labels'\n[rank1]: RuntimeError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(",
        "[rank0]: KeyError: 'x'\n[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:41349",
        "wandb: Network error (ReadTimeout), entering retry loop.\nwandb: W&B API key is configured",
        'File "/x/urllib3/connection.py", line 174\nbotocore.session\nsocket.gaierror: Name or service not known',
        "httpx.ConnectTimeout: timed out\ns3fs.core: retrying",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "transport/nvls.cc:246 NCCL WARN Cuda failure 3 'initialization error'",
        "gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: [0.5.157.198]",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<38560> with status=4 opcode=0 len=0 vendor err 81",
        "The node 'x' has failed to shutdown the rendezvous 'y' due to an error of type RendezvousConnectionError.",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://api.wandb.ai/graphql",
        "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-x, error: No such file or directory",
    ],
)
def test_what_follows_from_others_or_harms_nothing_explains_nothing(message: str) -> None:
    assert known_errors.find(message) is None


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500).", "rendezvous"),
        ("socket has failed to listen\nbind to [::]:29500 (errno: 98 - Address already in use)", "port-taken"),
        ("Watchdog caught collective operation timeout\nCUDA out of memory. Tried to allocate 2 GiB", "gpu-memory"),
        ("unhandled cuda error\nFailed to bind NVLink SHARP: CUDA error 2 'out of memory'", "nvlink-sharp"),
        ("unable to open shared memory object </torch_1>\nOSError: [Errno 24] Too many open files", "open-files"),
        ("ncclSystemError: System call failed.\nLast error:\nCall to posix_fallocate failed", "shared-memory"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nBroken pipe", "gpu-hardware"),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41349. A worker crashed.", "gone"),
        ("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7353: Connection reset by peer.", "gone"),
        ("[gloo/transport/tcp/pair.cc:152] SO_ERROR: Connection refused, remote=[127.0.0.1]:14215", "own-address"),
        ("KeyError: 'x'\nWatchdog caught collective operation timeout\nCUDA out of memory. Tried", "gpu-memory"),
        ("s3fs is installed\nHTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.", "hub"),
        ("wandb: Network error (ReadTimeout)\nhuggingface_hub/file.py\nhttpx.ConnectTimeout: timed out", "hub"),
        ("httpx.ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "certificate"),
        ("httpx.ConnectError: [Errno -3] Temporary failure in name resolution", "hub"),
        ("httpx.ConnectError: [Errno -3] Temporary failure in name resolution\nLocalEntryNotFoundError: An", "hub"),
        ("GatedRepoError: 403\nLocalEntryNotFoundError: An error happened while trying to locate", "hub-access"),
        ("LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub", "hub-file"),
        ("NET/IB : Got completion from peer 10.0.0.1<1> with status=12 opcode=1 len=0 vendor err 129", "infiniband"),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co'): Max retries", "hub"),
        (
            "unhandled cuda error, CUDA error 804: forward compatibility was attempted on non supported HW",
            "driver-mismatch",
        ),
        ("AssertionError: Torch not compiled with CUDA enabled", "gpu-architecture"),
        ("exitcode  : -7 (pid: 5)", "bus-error"),
        (
            "DataLoader worker (pid 1) is killed by signal: Bus error. Workers are out of shared memory.",
            "shared-memory",
        ),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "broken-file"),
        (
            "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!",
            "two-devices",
        ),
        ("TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'", "library-versions"),
        ("got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor", "mixed-tensors"),
        ("SignalException: Process 81061 got sigval:1", "hangup"),
        ("ncclSystemError: System call failed.\nCUDA out of memory. Tried to allocate 2 GiB", "gpu-memory"),
    ],
)
def test_the_more_telling_line_counts(message: str, row: str) -> None:
    assert known_errors.find(message) == row


@pytest.mark.parametrize("part", sorted({text["part"] for text in PUBLIC}))
def test_public_reports(part: str) -> None:
    texts = [text for text in PUBLIC if text["part"] == part]
    wrong = [(text["source"], known_errors.find(text["text"])) for text in texts if verdict(text) == "wrong"]
    assert len(wrong) <= MOST_WRONG * len(texts), wrong


def test_more_public_reports_are_explained_than_not() -> None:
    verdicts = Counter(map(verdict, PUBLIC))
    assert verdicts["right"] > verdicts.total() / 2, verdicts


def test_every_row_of_the_public_reports_is_in_the_table() -> None:
    assert not MACHINE_ERRORS.keys() & SCRIPT_ERRORS.keys()
    assert {name for text in PUBLIC for name in (*text["rows"], *text.get("meant", ()))} <= known_errors.KNOWN.keys()
    assert len({text["source"] for text in PUBLIC}) == len(PUBLIC) >= 120


def test_what_names_its_own_cause_comes_before_symptoms() -> None:
    symptoms = [bool(row.means) for row in known_errors.KNOWN.values()]
    assert symptoms == sorted(symptoms)
