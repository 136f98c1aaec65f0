#!/usr/bin/env bash
# Small launches of every kernel under compute-sanitizer: fails on any finding.
#   PYTHON=python3   which Python runs them; without the extension, `gemm` is left out
#   ONLY=softmax     `norm`, `softmax`, `shared`, `quantize`, `scales` or `products` alone; `shared`
#                    wants 78 multiprocessors
#   JOBS=4           processes at once, among which the launches are dealt out
#   LOGS=folder      where what the tools print is left
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
jobs=${JOBS:-4}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
logs=${LOGS:-$scratch}
export PYTHONPATH=. JAX_PLATFORMS=cuda,cpu SHARDOPS_CACHE_DIR=$scratch/cache
export XLA_PYTHON_CLIENT_ALLOCATOR=platform # an allocation a buffer: the tool sees where each ends

command -v compute-sanitizer >/dev/null || {
  echo "sanitize: compute-sanitizer is not on PATH; it comes with the CUDA toolkit." >&2
  exit 2
}

# launches TOOL LOG WHAT [OPTION...]: its output goes to LOG, its exit status is the program's.
launches() {
  # The tool waits for the GPU to be touched: JAX is imported and kernels are compiled before.
  local options=(--tool "$1" --target-processes application-only --print-limit 20 --launch-timeout 600)
  if [[ $1 == memcheck ]]; then options+=(--padding 256); fi
  compute-sanitizer "${options[@]}" "$python" benchmarks/checked_launches.py "${@:3}" >"$2" 2>&1
}

# planted TOOL WHAT FINDING
planted() {
  local log=$logs/$1-$2.log
  launches "$1" "$log" "$2" || true # the launch that goes wrong may end the program
  if ! grep -q "$3" "$log"; then
    tail -n 20 "$log"
    echo "sanitize: $1 did not find a planted $2: it cannot work on this machine." >&2
    exit 2
  fi
  echo "$1 finds a planted $2"
}
planted memcheck overrun 'Invalid __global__ write'
planted racecheck race 'Race reported'

failed=0
# check TOOL SHARES WHAT [OPTION...]
check() {
  local tool=$1 shares=$2 share log status summary running=()
  SECONDS=0
  for ((share = 1; share <= shares; ++share)); do
    launches "$tool" "$logs/$tool-$3-$share.log" "${@:3}" --share "$share/$shares" &
    running+=($!)
  done
  for ((share = 1; share <= shares; ++share)); do
    log=$logs/$tool-$3-$share.log status=0
    wait "${running[share - 1]}" || status=$?
    summary=$(grep -E '(ERROR|RACECHECK) SUMMARY' "$log" || echo "no summary")
    if [[ $status == 0 && $summary =~ SUMMARY:\ 0\ (errors|hazards) ]]; then
      echo "$tool: $(grep '^checked_launches:' "$log"), no finding, $SECONDS s"
    else
      tail -n 60 "$log"
      echo "sanitize: $tool of $3 failed (exit status $status): $summary" >&2
      failed=1
    fi
  done
}

only=(${ONLY:+--only "$ONLY"})
# Racecheck follows mbarriers from the threads that arrive, not from those a warp's one lane speaks for.
for build in "" --for-racecheck; do
  "$python" benchmarks/checked_launches.py build $build "${only[@]}"
done
check memcheck "$jobs" kernels "${only[@]}"
check racecheck "$jobs" kernels --for-racecheck "${only[@]}"
if "$python" -c 'import shardops._core' 2>/dev/null; then
  check memcheck 1 gemm
else
  echo "gemm left out: $python has no extension shardops._core"
fi
exit $failed
