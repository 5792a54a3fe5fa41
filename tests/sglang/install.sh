#!/usr/bin/env bash
# Makes .venv-sglang: SGLang 0.5.23 as it is on the package index, for a CPU, with stand-ins for the three modules that have no CPU build.
# PYTHON: the interpreter that makes it. TORCH_INDEX: URL of an index with torch's CPU builds, beside those that pip is configured with.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-sglang

"${PYTHON:-python3.11}" -m venv --clear "$venv"
"$venv/bin/pip" install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement tests/sglang/requirements.txt
"$venv/bin/pip" install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7
# Every Python of this environment finds the stand-ins, SGLang's own sub-processes too.
echo "$PWD/tests/sglang/stand_ins" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rollart-stand-ins.pth"
