"""One session on a lent GPU for speculation: the oracle benchmark, verify steps, and a head for the default model.

    python benchmarks/speculation_session.py pack MODEL.gguf build/session       # where the model is: parts that travel
    python benchmarks/speculation_session.py run build/session OUT [--seconds 540] [--kind block] [--skip oracle,verify]
    python benchmarks/speculation_session.py join OUT heads/NAME                 # back again: the head's files

The machine needs torch, Triton, numpy, safetensors, tokenizers and jinja2, and nothing of the server. It may refuse
large files, so the model travels in parts, of which one call may carry some (docs/speculation.md has the calls), and
what comes back is in parts too. `run` gives each measurement a limit, and training what is left of the time. What was
printed is in OUT/*.log, also if a limit ended it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PART_BYTES = 40 << 20  # of the model
BACK_BYTES = 15 << 20  # of a file that comes back
ORACLE_S, VERIFY_S = 200, 50  # limits
RESERVE_S = 25  # after training: files are written and sent back
ORACLE = ["speculation_gpu.py", "--batches", "1,16,64,256", "--chances", "0.78,0.0", "--repeats", "1"]
VERIFY = ["verify.py", "--steps", "--batches", "1,64", "--contexts", "600", "--queries", "1,4,6"]


def pack(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut a file into parts. `parts.json` has its name, its digest and theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    content, parts = path.read_bytes(), list[Path]()
    for nth, first in enumerate(range(0, len(content), part_bytes)):
        parts.append(folder / f"{path.name}.part-{nth:02}")
        parts[-1].write_bytes(content[first : first + part_bytes])
    digest = hashlib.sha256(content).hexdigest()
    about = {"name": path.name, "digest": digest, "parts": [part.name for part in parts]}
    (folder / "parts.json").write_text(json.dumps(about) + "\n")
    return parts


def join(folder: Path, target: Path) -> Path:
    """The file whose parts are in the folder. Raises SystemExit if some are missing or damaged."""
    if not (folder / "parts.json").exists():
        raise SystemExit(f"{folder} has no parts.json; pack a file first.")
    about = json.loads((folder / "parts.json").read_text())
    if missing := [part for part in about["parts"] if not (folder / part).exists()]:
        raise SystemExit(f"{folder} lacks {', '.join(missing)}; carry them in another call.")
    content = b"".join((folder / part).read_bytes() for part in about["parts"])
    if hashlib.sha256(content).hexdigest() != about["digest"]:
        raise SystemExit(f"The parts of {about['name']} in {folder} are damaged; carry them again.")
    target.mkdir(parents=True, exist_ok=True)
    (target / about["name"]).write_bytes(content)
    return target / str(about["name"])


def measure(name: str, command: Sequence[str], limit_s: float, out: Path) -> int:
    """Run a command with a time limit. Its output is printed and kept."""
    print(f"== {name}, at most {limit_s:.0f} s: {' '.join(command)}", flush=True)
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    begin_s = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=env, cwd=FOLDER.parent
        )
        try:
            status = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    print("\n".join((out / f"{name}.log").read_text().splitlines()[-25:]))
    print(f"== {name} ended with {status} after {time.monotonic() - begin_s:.0f} s", flush=True)
    return status


def train(model: Path, options: argparse.Namespace, limit_s: float) -> int:
    out: Path = options.out
    head = out.parent / f"{out.name}-head"
    command = [
        "-m", "quire.cli.main", "train-draft", str(model), "--kind", options.kind, "--out", str(head),
        "--minutes", f"{limit_s / 60:.2f}", "--device", options.device, *options.train,
    ]  # fmt: skip
    status = measure("train", command, limit_s + 60, out)
    if status == 0:
        (out / "config.json").write_text((head / "config.json").read_text())
        for part in pack(head / "model.safetensors", out, BACK_BYTES):
            print(f"{part.name}: {part.stat().st_size:,} bytes")
    return status


def run(options: argparse.Namespace) -> int:
    begin_s = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    model = join(options.parts, options.parts)
    folder = str(FOLDER.relative_to(FOLDER.parent))
    statuses = []
    if "oracle" not in options.skip:
        statuses.append(measure("oracle", [f"{folder}/{ORACLE[0]}", *ORACLE[1:]], ORACLE_S, options.out))
    if "verify" not in options.skip:
        statuses.append(measure("verify", [f"{folder}/{VERIFY[0]}", *VERIFY[1:]], VERIFY_S, options.out))
    if "train" not in options.skip:
        left_s = options.seconds - RESERVE_S - (time.monotonic() - begin_s)
        statuses.append(train(model, options, left_s))
    return max(statuses, default=0, key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("file", type=Path)
    packing.add_argument("folder", type=Path)
    joining = commands.add_parser("join")
    joining.add_argument("folder", type=Path)
    joining.add_argument("target", type=Path)
    running = commands.add_parser("run")
    running.add_argument("parts", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--seconds", type=float, default=540.0)
    running.add_argument("--kind", choices=("block", "eagle", "medusa", "exit"), default="block")
    running.add_argument("--device", default="cuda")
    running.add_argument("--skip", type=lambda text: text.split(","), default=[])
    running.add_argument("--train", type=str.split, default=[], help="more options of train-draft, as one text")
    options = parser.parse_args()
    if options.command == "run":
        raise SystemExit(run(options))
    if options.command == "pack":
        for part in pack(options.file, options.folder, PART_BYTES):
            print(part)
        return
    print(join(options.folder, options.target))
    if (config := options.folder / "config.json").exists():  # a head's
        (options.target / "config.json").write_text(config.read_text())


if __name__ == "__main__":
    main()
