#!/usr/bin/env bash
# Set up .venv, as the Makefile calls it.
#   setup_venv.sh build            create .venv, build the extension, install this checkout, editable
#   setup_venv.sh extras A,B       install the packages of these extras
# Environment: PYTHON, SYSTEM_PACKAGES (see the Makefile), VENV (default .venv), PIN (a requirement
# that holds while the others are chosen, such as jax==0.10.2).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "shardops needs Python 3.11 or newer; none found as ${PYTHON:-python3}." \
    "Name one: make PYTHON=/path/to/python3 ..." >&2
  return 1
}

# What `venv --system-site-packages` does, also where $1 is itself the Python of an environment.
show_packages_of() {
  "$1" -c 'import site; [print(f"import site; site.addsitedir({p!r})") for p in site.getsitepackages()]' \
    >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/system_packages.pth"
}

install() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

build() {
  local python
  python=$(find_python)
  if ! new_enough "$venv/bin/python"; then
    rm -rf "$venv"
    "$python" -m venv "$venv" || {
      echo "$python cannot create a virtual environment: install its venv module" >&2
      return 1
    }
  fi
  if [[ -n ${SYSTEM_PACKAGES:-} ]]; then show_packages_of "$python"; fi
  echo "installing shardops into $venv ($("$venv/bin/python" --version))"
  if [[ -n ${SYSTEM_PACKAGES:-} ]]; then
    install --no-build-isolation --no-deps --editable .
  else
    install --editable . ${PIN:-}
  fi
  touch "$venv/built"
}

extras() {
  if [[ -z ${SYSTEM_PACKAGES:-} ]]; then
    echo "installing the packages of [$1] into $venv"
    "$venv/bin/python" scripts/requirements.py "$1" >"$venv/requirements.txt"
    install --requirement "$venv/requirements.txt" ${PIN:-}
  fi
  touch "$venv/ready-$1"
}

"$@"
