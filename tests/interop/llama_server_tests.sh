#!/bin/bash
# Runs the server tests of llama.cpp, from the source of the PyPI package llama-cpp-python 0.3.36, against
# `mantissa serve` through llama_server.py.
#
# usage: llama_server_tests.sh MANTISSA STORIES260K [PYTEST ARGUMENTS]
#   MANTISSA     the binary
#   STORIES260K  folder of the model stories260K
# Needs Python with aiohttp, pytest, openai, requests, filelock, wget and numpy. LLAMA_CPP names llama.cpp's source if it
# is there; else it is downloaded.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export MANTISSA=$(realpath "$1") MANTISSA_MODEL=$(realpath "$2")
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=${LLAMA_CPP:-}
if [ -z "$source" ]; then
  python3 -m pip download --no-deps --no-binary :all: --no-build-isolation -d "$work" llama-cpp-python==0.3.36
  tar -xzf "$work"/llama_cpp_python-0.3.36.tar.gz -C "$work"
  source=$work/llama_cpp_python-0.3.36/vendor/llama.cpp
fi
mkdir -p "$work"/tree/tools/server "$work"/tree/models
cp -r "$source"/tools/server/tests "$work"/tree/tools/server/
cp -r "$source"/models/templates "$work"/tree/models/
cd "$work"/tree/tools/server/tests
# Their conftest.py starts every model once, to download it. Ours only stops servers.
cat > conftest.py <<'PY'
import pytest
from utils import *


@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(server_instances):
        server.stop()
PY
export LLAMA_SERVER_BIN_PATH=$here/llama_server.py PORT=${PORT:-8080}
# The files that use stories260K. Slow tests load models of up to 8 GB.
files=(basic chat_completion compat_anthropic compat_gcp compat_oai_responses completion ctx_shift ignore_eos
  kv_keep_only_active metrics proxy security sleep slot_save template tokenize tool_call)
paths=()
for file in "${files[@]}"; do paths+=("unit/test_$file.py"); done
python3 -m pytest -q -m "not slow" -p no:cacheprovider -o markers=slow "${paths[@]}" "$@"
