#!/usr/bin/env bash
# Small launches of every kernel under compute-sanitizer: fails on any finding.
#   PYTHON=python3   which Python runs them; without the extension, `gemm` is left out
#   ONLY=softmax     `norm`, `softmax` or `quantize` alone
#   LOGS=folder      where what the tools print is left
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
logs=${LOGS:-$scratch}
export PYTHONPATH=. JAX_PLATFORMS=cuda,cpu SHARDOPS_CACHE_DIR=$scratch/cache
export XLA_PYTHON_CLIENT_ALLOCATOR=platform # an allocation a buffer: the tool sees where each ends

command -v compute-sanitizer >/dev/null || {
  echo "sanitize: compute-sanitizer is not on PATH; it comes with the CUDA toolkit." >&2
  exit 2
}

# launches TOOL WHAT [OPTION...]: its output goes to $log, its exit status is the program's.
launches() {
  # Kernels are compiled before the GPU is first touched, which the tool waits for.
  local options=(--tool "$1" --target-processes application-only --print-limit 20 --launch-timeout 600)
  if [[ $1 == memcheck ]]; then options+=(--padding 256); fi
  log=$logs/$1-$2.log
  compute-sanitizer "${options[@]}" "$python" benchmarks/checked_launches.py "${@:2}" >"$log" 2>&1
}

launches memcheck planted || true # the launch that goes wrong may end the program
if ! grep -q 'Invalid __global__ write' "$log"; then
  tail -n 20 "$log"
  echo "sanitize: memcheck did not find a planted error: it cannot work on this machine." >&2
  exit 2
fi
echo "memcheck finds a planted error"

failed=0
check() {
  local status=0 summary
  SECONDS=0
  launches "$@" || status=$?
  summary=$(grep -E '(ERROR|RACECHECK) SUMMARY' "$log" || echo "no summary")
  if [[ $status == 0 && $summary =~ SUMMARY:\ 0\ (errors|hazards) ]]; then
    echo "$1: $(grep '^checked_launches:' "$log"), no finding, $SECONDS s"
  else
    tail -n 60 "$log"
    echo "sanitize: $1 of $2 failed (exit status $status): $summary" >&2
    failed=1
  fi
}

only=(${ONLY:+--only "$ONLY"})
check memcheck kernels "${only[@]}"
# Racecheck follows mbarriers from the threads that arrive, not from those a warp's one lane speaks for.
check racecheck kernels --every-lane "${only[@]}"
if "$python" -c 'import shardops._core' 2>/dev/null; then
  check memcheck gemm
else
  echo "gemm left out: $python has no extension shardops._core"
fi
exit $failed
