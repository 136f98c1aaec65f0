"""Input that the demo refuses: one line on stderr, exit code 2, nothing overwritten."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from .conftest import ROOT, Run

SMALL = ("--dim", 32, "--heads", 4, "--layers", 1, "--seq", 32, "--batch", 8, "--no-check")


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(run: Run, *arguments: object, **environment: str) -> str:
    result = run(*arguments, **environment)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "--nope"),
        (["--ste", "3"], "--ste"),
        (["surplus"], "surplus"),
        (["--steps", "0"], "'0' is no whole number from 1 up"),
        (["--steps", "x"], "'x' is no whole number"),
        (["--steps"], "--steps: expected one argument"),
        (["--seed", "-1"], "'-1' is no whole number from 0"),
        (["--platform", "abacus"], "invalid choice: 'abacus'"),
        (["--recipe", "fp8"], "--recipe: invalid choice: 'fp8'"),
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--mesh", ""], "'' is not of the form dp=2,tp=4"),
        (["--mesh", "dp=2,pp=2"], "'dp=2,pp=2' is not of the form"),
        (["--mesh", "dp=2,dp=2"], "'dp=2,dp=2' is not of the form"),
        (["--mesh", "dp=0"], "'dp=0' is not of the form"),
        (["--dim", "130"], "--dim 130 is not divisible by --heads 4"),
        (["--mesh", "dp=3"], "--batch 16 is not divisible by dp=3"),
        (["--mesh", "tp=3"], "--heads 4 is not divisible by tp=3"),
        (["--seq", "126"], "--seq 126 is not divisible by tp=4"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--resume"], "there is no checkpoint in"),
        (["--corpus", "absent"], "absent is no folder"),
        (["--corpus", "empty"], "empty has 0 text files"),
        (["--corpus", "one"], "one has 1 text files"),
        (["--corpus", "short"], "--seq 128 needs more"),
        (["--out", "file"], "--out file cannot be written"),
        (["--out", "file/below"], "--out file/below cannot be written"),
        (["--platform", "cuda"], "--platform cuda has no device here"),
        (["--dim", "4000000000"], "not enough memory"),
    ],
)
def test_train_lm_refuses(
    train_lm: Run, tmp_path: Path, monkeypatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, files in (("empty", 0), ("one", 1), ("short", 2)):
        Path(folder).mkdir()
        for number in range(files):
            Path(folder, f"{number}.py").write_text("x = 1\n")
    Path("file").write_text("kept")
    out = [] if "--out" in arguments else ["--out", "out"]
    assert said in refused(train_lm, *arguments, *out)
    assert Path("file").read_text() == "kept"
    assert snapshot(Path("out")) == {}


def test_train_lm_refuses_a_mesh_of_more_devices_than_there_are(
    train_lm: Run, tmp_path: Path
) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    said = refused(train_lm, "--mesh", "dp=2,tp=4", "--out", tmp_path, XLA_FLAGS=flags)
    assert "--mesh dp=2,tp=4 needs 8 devices, there are 4 (cpu)" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_train_lm_refuses_a_file_that_it_cannot_read(train_lm: Run, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n" * 100)
    (tmp_path / "a.py").chmod(0)
    said = refused(train_lm, "--corpus", tmp_path, "--out", tmp_path / "out")
    assert "cannot read" in said


@pytest.fixture(scope="module")
def trained(train_lm: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    result = train_lm(*SMALL, "--steps", 2, "--mesh", "dp=1,tp=2", "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "holds a checkpoint of step 2: continue it with --resume or replace it"),
        (["--resume", "--steps", 2], "is at step 2, --steps 2 adds none"),
        (["--resume", "--dim", 64], "was trained with --dim 32, not 64"),
        (["--resume", "--layers", 2], "was trained with --layers 1, not 2"),
        (["--resume", "--seed", 1], "was trained with --seed 0, not 1"),
        (["--resume", "--recipe", "delayed"], "was trained with --recipe none, not delayed"),
        (["--resume", "--dtype", "bfloat16"], "was trained with --dtype float32, not bfloat16"),
        (["--resume", "--corpus", "other"], "was trained on other text"),
        (["--overwrite", "--corpus", "absent"], "absent is no folder"),
        (["--overwrite", "--mesh", "tp=3"], "--heads 4 is not divisible by tp=3"),
        (["--overwrite", "--platform", "cuda"], "has no device here"),
    ],
)
def test_train_lm_keeps_a_checkpoint(
    train_lm: Run, trained: Path, tmp_path: Path, monkeypatch, arguments: list[object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    for name in ("a.py", "b.py"):
        Path("other", name).write_text("x = 1\n" * 100)
    before = snapshot(trained)
    assert said in refused(train_lm, *SMALL, "--out", trained, *arguments)
    assert snapshot(trained) == before


def damage_arrays(step: Path) -> None:
    shutil.rmtree(step / "state")


def largest(step: Path) -> Path:
    return max(
        (p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def cut_arrays(step: Path) -> None:
    path = largest(step)
    path.write_bytes(path.read_bytes()[:20])


def change_arrays(step: Path) -> None:
    path = largest(step)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 16] = bytes(b ^ 0xFF for b in data[middle : middle + 16])
    path.write_bytes(data)


def cut_manifest(step: Path) -> None:
    path = step / "state" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:20])


def empty_run(step: Path) -> None:
    (step / "record" / "metadata").write_text(json.dumps({"run": None, "losses": []}))


def other_losses(step: Path) -> None:
    path = step / "record" / "metadata"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "losses": record["losses"][:1]}))


def damage_record(step: Path) -> None:
    (step / "record" / "metadata").write_text("{")


def foreign_record(step: Path) -> None:
    (step / "record" / "metadata").write_text(json.dumps({"losses": []}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_arrays, "cannot read"),
        (cut_arrays, "cannot read"),
        (cut_manifest, "cannot read"),
        (change_arrays, ""),  # where the store does not notice, the checksum does
        (empty_run, "is no checkpoint of this program"),
        (other_losses, "is no checkpoint of this program"),
        (damage_record, "is no checkpoint of this program"),
        (foreign_record, "is no checkpoint of this program"),
    ],
)
def test_train_lm_refuses_a_damaged_checkpoint(
    train_lm: Run, trained: Path, tmp_path: Path, damage, said: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    damage(out / "checkpoint" / "2")
    before = snapshot(out)
    assert said in refused(train_lm, *SMALL, "--out", out, "--resume", "--steps", 4)
    assert snapshot(out) == before


@pytest.mark.parametrize(
    ("name", "said"), [("checkpoint", "it is no folder"), ("loss.png", "it is a folder")]
)
def test_train_lm_sees_what_is_in_the_way(
    train_lm: Run, tmp_path: Path, name: str, said: str
) -> None:
    if name == "checkpoint":
        (tmp_path / name).write_text("hi")
    else:
        (tmp_path / name).mkdir()
    assert said in refused(train_lm, *SMALL, "--out", tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SHARDOPS_KERNELS", "(", "SHARDOPS_KERNELS is '('"),
        ("JAX_PLATFORMS", "cuda", "has no device here"),
    ],
)
def test_train_lm_refuses_an_environment(
    train_lm: Run, tmp_path: Path, variable: str, value: str, said: str
) -> None:
    assert said in refused(train_lm, *SMALL, "--out", tmp_path, **{variable: value})


def test_train_lm_refuses_a_folder_in_use(train_lm: Run, tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "is in use by another run" in refused(train_lm, *SMALL, "--out", tmp_path)
    os.close(lock)


def test_train_lm_keeps_a_foreign_picture(train_lm: Run, tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_text("mine")
    assert "--overwrite replaces it" in refused(train_lm, *SMALL, "--out", tmp_path)
    assert (tmp_path / "loss.png").read_text() == "mine"


def test_train_lm_names_a_missing_package(train_lm: Run, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib')")
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    out = ("--out", tmp_path / "out")
    assert "no matplotlib" in refused(train_lm, *SMALL, *out, PYTHONPATH=search)


@pytest.mark.parametrize("option", ["--corpus", "--out"])
def test_train_lm_refuses_a_name_too_long(train_lm: Run, tmp_path: Path, option: str) -> None:
    out = [] if option == "--out" else ["--out", tmp_path]
    assert "too long" in refused(train_lm, *SMALL, *out, option, "a" * 300)


def test_train_lm_overwrites_where_told(train_lm: Run, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    mesh = ("--mesh", "dp=1,tp=1")
    result = train_lm(*SMALL, "--steps", 1, *mesh, "--seed", 5, "--out", out, "--overwrite")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["1"]
