#!/usr/bin/env bash
# Run a smoke part of the tests on the oldest, a middle and the newest JAX, each with its own Python.
# A pair whose interpreter is not on this machine is named and skipped.
#   scripts/test_versions.sh [3.11 ...]     only these Pythons
set -euo pipefail
cd "$(dirname "$0")/.."

pairs=("3.11 jax==0.10.2" "3.12 jax==0.11.2" "3.13 jax")
smoke=(tests/primitives tests/test_hlo.py tests/examples/test_readme.py)

interpreter() {
  local candidate
  for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    # A version manager's shim is on PATH even where that version is not active: run it to know.
    if "$candidate" -c 'import ensurepip' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

failed=() ran=0
for pair in "${pairs[@]}"; do
  read -r version jax <<<"$pair"
  if [[ $# -gt 0 && " $* " != *" $version "* ]]; then continue; fi
  if ! python=$(interpreter "$version"); then
    echo "skipped: $jax on Python $version: no python$version here"
    continue
  fi
  venv=.venv-versions/$version
  echo "== $jax on Python $version"
  export VENV=$venv PYTHON=$python PIN=$jax SYSTEM_PACKAGES=
  scripts/setup_venv.sh build
  scripts/setup_venv.sh extras test,nvrtc
  "$venv/bin/python" -c 'import jax, sys; print("jax", jax.__version__, "Python", sys.version)'
  ran=$((ran + 1))
  "$venv/bin/python" -m pytest -q -n 2 --dist loadfile "${smoke[@]}" || failed+=("$version")
done
if [[ $ran -eq 0 ]]; then
  echo "no interpreter of the supported pairs was found" >&2
  exit 1
fi
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed on Python ${failed[*]}" >&2
  exit 1
fi
