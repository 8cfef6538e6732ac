#!/bin/bash
# Checks `mantissa serve` against its own /openapi.json with schemathesis: no 5xx, no response outside of the schema.
#
# usage: schemathesis.sh [URL] [ARGUMENTS OF SCHEMATHESIS]
set -euo pipefail
url=${1:-http://127.0.0.1:8080}
shift || true
exec schemathesis run "$url/openapi.json" --url "$url" --checks not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance \
  --max-examples 40 --workers 4 --request-timeout 30 "$@"
