"""The examples of docs/*.md: each page's, top to bottom, as one program."""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, user_environment

FENCE = re.compile(r"^```(\S*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BREAK = "\0"  # printed after each block
PAGES = sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = [page for page in PAGES if "```python\n" in page.read_text()]
COMMANDS = [page for page in PAGES if "\npython -m shardops " in page.read_text()]


def program(page: str) -> str:
    """The Python of a page, its line numbers those of the page; BREAK printed after each block."""
    lines: list[str] = []
    inside = False
    for line in page.splitlines():
        if inside and line == "```":
            lines.append(f"print({BREAK!r}, end='')")
            inside = False
        else:
            lines.append(line if inside else "")
            inside = inside or line == "```python"
    return "\n".join(lines) + "\n"


def shown(page: str, language: str) -> list[tuple[str, str]]:
    """The blocks of a language, each with the text block that comes next, or nothing."""
    blocks = [*FENCE.findall(page), ("", "")]
    return [
        (block, text if after == "text" else "")
        for (fence, block), (after, text) in itertools.pairwise(blocks)
        if fence == language
    ]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_examples_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    name = "with_flax" if page.stem == "flax" else page.stem  # flax.py would hide Flax
    script = tmp_path / f"{name}.py"
    script.write_text(program(text))
    printed = run([sys.executable, str(script)], tmp_path)
    assert printed.split(BREAK) == [*(output for _, output in shown(text, "python")), ""]


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.stem)
def test_commands_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    for block, output in shown(page.read_text(), "sh"):
        if block.startswith("python -m shardops "):
            printed = run([sys.executable, *arguments(block)], tmp_path)
            if page.stem == "kernels":  # times, and what the installed compiler makes of the source
                printed, output = without_numbers(printed), without_numbers(output)
            assert printed == output


def without_numbers(table: str) -> str:
    return re.sub(r" +[\d.,]+", " #", table)


def test_readme_quotes_what_its_command_prints(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [(block, _)] = shown(readme, "sh")
    printed = run([sys.executable, *arguments(block)], tmp_path)
    _, paragraph, *_ = readme.partition(block)[2].split("\n\n")
    quotes = re.findall(r"`(.*?)`", paragraph.replace("\n", " "))
    assert quotes
    for quote in quotes:
        assert quote in printed


def arguments(block: str) -> list[str]:
    """Those of a `python …` command line, which may go on after a backslash."""
    return shlex.split(block.replace("\\\n", " "))[1:]


def run(command: list[str], cwd: Path) -> str:
    """What the command prints, with 8 virtual devices."""
    env = user_environment(JAX_NUM_CPU_DEVICES="8")
    result = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_run_or_shown(page: Path) -> None:
    languages = {language for language, _ in FENCE.findall(page.read_text())}
    directives = {"{toctree}", "{include}", "{eval-rst}"}
    assert languages <= {"python", "text", "sh", *directives}
