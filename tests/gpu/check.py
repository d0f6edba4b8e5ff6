"""Run all that needs a GPU, as one prepared run without a network (scripts/gpu_check).

First it unpacks wheels, builds the extension in place and compiles the kernels that are not in the cache. Then come
the parts, each ended at its limit: bits (60 s), kernels (75 s), nccl (75 s), train (75 s), sanitize (45 s). Under --out
it writes results.jsonl and a log for each part as they go, and after each part one archive of everything. A table is
printed last. The exit status is the sum of failures: 1 preparation, 2 bits, 4 kernels, 8 nccl, 16 train, 32 sanitize.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from tests.gpu import machine, report, results
from tests.gpu.machine import NO_COMPILER
from tests.gpu.parts import PYTEST_INI, Command, Part, parts

NAMES = ("bits", "kernels", "nccl", "train", "sanitize")
UNPREPARED = 1
_POLL_S = 0.05
_BUILD_LIMIT_S, _COMPILE_LIMIT_S, _TRY_LIMIT_S = 150.0, 300.0, 60.0
_GRACE_S = 2.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(NAMES), help="parts to run, comma-separated")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that the machine lacks")
    parser.add_argument("--out", type=Path, default=machine.ROOT / "out" / "gpu_check", help="folder for the results")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("COMMLIB_CACHE_DIR") or machine.ROOT / "out" / "gpu-kernels"),
        help="folder of compiled kernels; carried along, nothing is compiled on the GPU's machine",
    )
    parser.add_argument("--architecture", help="compile for it, as 90 for sm_90; the device's by default, 90 with none")
    parser.add_argument("--dry", action="store_true", help="prepare and print the plan; needs no GPU")
    args = parser.parse_args(argv)
    args.only = [name.strip() for name in args.only.split(",")]
    unknown = sorted(set(args.only) - set(NAMES))
    if unknown:
        parser.error(f"--only: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
    return args


class Check:
    """One run.

    Args:
        args: The command line.
        work: A folder for temporary files.
    """

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.out: Path = args.out.resolve()
        self.work = work
        self.status = 0
        self.seconds: dict[str, float] = {}
        self.out.mkdir(parents=True, exist_ok=True)
        for old in (*self.out.glob("*.log"), self.out / report.RESULTS, self.out / report.ARCHIVE):
            old.unlink(missing_ok=True)
        (work / "made").mkdir()
        (work / "site").mkdir()
        (work / "pytest.ini").write_text(PYTEST_INI)
        os.environ[results.FILE_VARIABLE] = str(self.out / report.RESULTS)
        self.env = machine.environment(work / "site", args.cache.resolve())
        self.chosen = [part for part in parts(work) if part.name in args.only]

    # -- preparation ---------------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Prepare the requirements of the parts; return whether they can run."""
        begin = time.monotonic()
        os.environ[results.PART_VARIABLE] = self.env[results.PART_VARIABLE] = "prepare"
        with (self.out / "prepare.log").open("wb") as log:
            is_ready = self._unpack() and self._build(log)
            device = machine.device_of_this_machine(self.env) if is_ready else None
            if device is None and not self.args.dry:
                results.add("device", results.FAILED, text="torch sees no CUDA device, or cannot be imported")
                is_ready = False
            elif device is not None:
                results.add("device", results.PASSED, device=device[0], architecture=device[1])
            is_ready = is_ready and self._compile(log, self.args.architecture or (device[1] if device else "90"))
        self.seconds["prepare"] = time.monotonic() - begin
        if not is_ready:
            self.status |= UNPREPARED
        return is_ready

    def _unpack(self) -> bool:
        site = self.work / "site"
        if self.args.wheels is not None:
            try:
                names = machine.install_wheels(self.args.wheels, site)
            except (OSError, ValueError) as error:
                results.add("wheels", results.FAILED, text=str(error))
                return False
            results.add("wheels", results.PASSED, wheels=names)
        needed = machine.NEEDED if self.args.dry else {**machine.NEEDED, **machine.ON_A_GPU}
        lacking = machine.missing(needed, site)
        if lacking:
            text = f"not here: {', '.join(lacking)}. Carry their wheels: pip download --no-deps NAME, then --wheels DIR"
            results.add("packages", results.FAILED, text=text)
            return False
        absent = machine.missing(machine.OPTIONAL, site)
        results.add("packages", results.PASSED, **({"text": f"without {', '.join(absent)}"} if absent else {}))
        return True

    def _build(self, log: IO[bytes]) -> bool:
        if machine.is_built():
            results.add("build", results.PASSED, text="the extension is there, later than its sources")
            return True
        return self._step("build", machine.build_command(), log, _BUILD_LIMIT_S) == 0

    def _compile(self, log: IO[bytes], architecture: str) -> bool:
        command = [sys.executable, "-m", "tests.gpu.compile_kernels", "--architecture", architecture]
        return self._step("compile", command, log, _COMPILE_LIMIT_S, says_itself=True) in (0, NO_COMPILER)

    def _step(
        self, name: str, argv: list[str], log: IO[bytes], limit_s: float, says_itself: bool = False
    ) -> int | None:
        begin = time.monotonic()
        codes = self._run([Command(name, argv)], log, begin + limit_s)
        if codes[name] != 0 or not says_itself:
            outcome = results.PASSED if codes[name] == 0 else results.FAILED
            if codes[name] != NO_COMPILER:
                results.add(name, outcome, seconds=round(time.monotonic() - begin, 1), text=ended(codes[name]))
        return codes[name]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def run_part(self, part: Part) -> None:
        """Run a part to its end or its limit, and record the result."""
        begin = time.monotonic()
        os.environ[results.PART_VARIABLE] = self.env[results.PART_VARIABLE] = part.name
        print(f"-- {part.name}: at most {part.limit_s:g} s", flush=True)
        before = len(results.read(self.out / report.RESULTS))
        with (self.out / f"{part.name}.log").open("ab") as log:
            for stage in sorted({command.stage for command in part.commands}):
                commands = [command for command in part.commands if command.stage == stage]
                codes = self._run(commands, log, begin + part.limit_s)
                for name, code in codes.items():
                    if code != 0:
                        results.add(name, results.FAILED, text=ended(code))
        found = results.read(self.out / report.RESULTS)[before:]
        if not any(each["outcome"] == results.PASSED for each in found):
            results.add(part.name, results.FAILED, text="nothing passed: no test, or no figure")
            found = [*found, {"outcome": results.FAILED}]
        if any(each["outcome"] == results.FAILED for each in found):
            self.status |= part.status
        self.seconds[part.name] = time.monotonic() - begin
        report.archive(self.out, self.work / "made")

    def try_part(self, part: Part) -> None:
        """Start the commands of a part as far as possible without a GPU, and print the plan."""
        os.environ[results.PART_VARIABLE] = self.env[results.PART_VARIABLE] = part.name
        begin = time.monotonic()
        print(f"\n{part.name}: at most {part.limit_s:g} s")
        for command in part.commands:
            settings = "".join(f"{key}={value} " for key, value in command.env.items())
            print(f"  {settings}{report.shortened(command.argv)}")
        tried = [
            Command(each.name, [*each.argv, *each.tried_with]) for each in part.commands if each.tried_with is not None
        ]
        with (self.out / f"{part.name}.log").open("ab") as log:
            for name, code in self._run(tried, log, begin + _TRY_LIMIT_S).items():
                results.add(name, results.FAILED if code else results.PASSED, text=ended(code))
                self.status |= part.status if code else 0
        if part.name == "sanitize" and shutil.which("compute-sanitizer", path=self.env["PATH"]) is None:
            results.add("compute-sanitizer", results.SKIPPED, text="not on the PATH of this machine")
        self.seconds[part.name] = time.monotonic() - begin

    def _run(self, commands: list[Command], log: IO[bytes], deadline: float) -> dict[str, int | None]:
        """Run commands side by side, output to `log`; return exit codes, None for commands ended by the deadline."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        codes: dict[str, int | None] = {}
        for command in commands:
            log.write(f"\n==== {command.name}: {report.shortened(command.argv)}\n".encode())
            log.flush()
            try:
                process = subprocess.Popen(
                    command.argv,
                    cwd=machine.ROOT,
                    env={**self.env, **command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                codes[command.name] = 127
            else:
                running[command.name] = process
        while any(process.poll() is None for process in running.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return codes | {name: end(process) for name, process in running.items()}


def end(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process; end it and all that it started if it still runs, and return None."""
    code = process.poll()
    for sign, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        if code is not None:
            time.sleep(_POLL_S)
    return code


def ended(code: int | None) -> str:
    """Say how a process ended."""
    return "ended at the limit" if code is None else f"ended with code {code}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        check = Check(args, Path(folder))
        if check.prepare():
            for part in check.chosen:
                (check.try_part if args.dry else check.run_part)(part)
        report.archive(check.out, check.work / "made")
    print(report.table(results.read(check.out / report.RESULTS), check.seconds), flush=True)
    print(f"{'dry run' if args.dry else 'run'} of {time.monotonic() - begin:.0f} s, exit status {check.status}")
    print(f"written to {check.out}", flush=True)
    return check.status


if __name__ == "__main__":
    sys.exit(main())
