"""Run by the Python of the image, never imported: compile sources to hash-based .pyc, the same bytes each time.

Standard library only, Python 3.9 and newer. `pyc_driver.py WORK WORKERS` runs every job of WORK/jobs.json in a
fresh process of its own with its files in the given order: what `marshal` writes depends on how often an object
is referred to, so on everything that the process compiled before.
"""

# ruff: noqa: PTH103, PTH123, T201

import importlib.util
import json
import marshal
import os
import subprocess
import sys

UNCHECKED_HASH = 0b01  # https://peps.python.org/pep-0552/


def compile_one(source: bytes, final: str) -> "bytes | None":
    """The .pyc of one source, or None where it is no Python of this version (templates, other majors)."""
    try:
        code = compile(source, final, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, OverflowError, MemoryError):
        return None
    header = importlib.util.MAGIC_NUMBER + UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)
    return header + marshal.dumps(code)


def run_job(work: str, index: int) -> None:
    """Compile one job's files in order into one file, and say where each is."""
    with open(f"{work}/jobs.json", encoding="utf-8") as stream:
        files = json.load(stream)[index]
    found = {}
    with open(f"{work}/out/{index}.bin", "wb") as out:
        for number, final in enumerate(files):
            with open(f"{work}/src/{index}/{number}", "rb") as stream:
                data = compile_one(stream.read(), final)
            if data is not None:
                found[final] = [out.tell(), len(data)]
                out.write(data)
    with open(f"{work}/out/{index}.json", "w", encoding="utf-8") as stream:
        json.dump(found, stream)


def run_all(work: str, workers: int) -> int:
    """All jobs, the largest first, `workers` at a time; prints the index of each that is done."""
    with open(f"{work}/jobs.json", encoding="utf-8") as stream:
        jobs = json.load(stream)
    os.makedirs(f"{work}/out", exist_ok=True)
    waiting = sorted(range(len(jobs)), key=lambda index: len(jobs[index]))
    running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
    environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": os.defpath}
    while waiting or running:
        while waiting and len(running) < workers:
            index = waiting.pop()
            command = [sys.executable, "-sSB", "-W", "ignore", "-X", "utf8", __file__, work, "--job", str(index)]
            process = subprocess.Popen(command, env=environment, cwd="/")
            running[process.pid] = (process, index)
        pid, status = os.wait()
        process, index = running.pop(pid)
        process.returncode = status
        if status:
            return 1
        print(index, flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[2] == "--job":
        run_job(sys.argv[1], int(sys.argv[3]))
    else:
        sys.exit(run_all(sys.argv[1], int(sys.argv[2])))
