"""Everything `make check` does, each step by name; all run, so that one pass shows every finding."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from valve_tools.check import firstlines, includes, names, pages, results, sharing, sizes, wiring
from valve_tools.check.tree import ROOT, command, tracked

PACKAGES = {
    "valved": "valved",
    "valve_tools": "tools",
    "valve_kube": "scheduler/valve_kube",
    "valve_scheduler": "scheduler/valve_scheduler",
    "valve_router": "scheduler/valve_router",
    "valve_tune": "tune/valve_tune",
}
# Laid out file by file, as installed: engines beside the core, and the one file that valved shares.
HOOK = {
    ".": "patches/hook",
    "policy": "patches/hook/policy",
    "cotrain": "patches/hook/cotrain",
    "vllm": "patches/vllm",
    "cotrain/card": "patches/hook/cotrain/card",
    "sglang": "patches/sglang",
    "tensorrt_llm": "patches/tensorrt_llm",
}


def type_tree() -> list[str]:
    """Lay the packages out under their import names, with the generated stubs, for mypy."""
    tree = ROOT / "build" / "types"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for package, folder in PACKAGES.items():
        if (ROOT / folder / "__init__.py").is_file():
            (tree / package).symlink_to(ROOT / folder)
    for package, folder in HOOK.items():
        (tree / "valve_hook" / package).mkdir(parents=True, exist_ok=True)
        for path in (ROOT / folder).glob("*.py"):
            (tree / "valve_hook" / package / path.name).symlink_to(path)
    (tree / "valve_abi").mkdir()
    for path in (ROOT / "proto" / "valve_abi").iterdir():
        (tree / "valve_abi" / path.name).symlink_to(path)
    generator = [sys.executable, str(ROOT / "proto/abi/generate.py"), str(tree / "valve_abi" / "headers.py")]
    subprocess.run(generator, check=True)
    (tree / "valve_hook" / "handout.py").symlink_to(ROOT / "valved/policy/handout.py")
    return sorted(path.name for path in tree.iterdir())


def ruff() -> list[str]:
    return [
        *command("ruff", "check", "--output-format", "concise", "."),
        *command("ruff", "format", "--diff", "-q", "."),
    ]


def mypy() -> list[str]:
    targets = [f"build/types/{name}" for name in type_tree()]
    return command(sys.executable, "-m", "mypy", "--no-error-summary", *targets, MYPYPATH="build/types")


def imports() -> list[str]:
    # From another folder: in the root, `valved` would be the source tree and not what is installed.
    argv = ("lint-imports", "--config", str(ROOT / ".importlinter"), "--no-cache")
    tune = str(ROOT / "tune")  # a wheel of its own, not installed here
    said = command(*argv, cwd=ROOT / "build", PYTHONPATH=tune)
    return [line for line in said if line.strip() and not set(line) & set("╔╚║")]


def clang_format() -> list[str]:
    files = [str(path.relative_to(ROOT)) for path in tracked(".c", ".h")]
    return command("clang-format", "--dry-run", "-Werror", *files) if files else []


STEPS = {
    "ruff": ruff,
    "mypy": mypy,
    "imports": imports,
    "includes": includes.findings,
    "clang-format": clang_format,
    "sizes": sizes.findings,
    "names": names.findings,
    "wiring": wiring.findings,
    "sharing": sharing.findings,
    "first lines": firstlines.findings,
    "pages": pages.findings,
    "results": results.findings,
}


def main() -> int:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    wanted = sys.argv[1:] or list(STEPS)
    failed = []
    for name in wanted:
        findings = STEPS[name]()
        print(f"check {name}: {'ok' if not findings else 'FAILED'}")
        if findings:
            failed.append(name)
            print("\n".join(f"  {line}" for line in findings[:40]))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
