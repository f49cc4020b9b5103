#!/usr/bin/env bash
# One step of a pipeline: run a recipe, tell later steps what came of it, and end as the gate ends.
#
# RECIPE    a recipe
# OPTIONS   overrides of its keys, key=value, one a line
# ACCEPT    true: end with 0 where every loss that blocks is waived
# COMPRESS  the program
#
# All of it comes from the environment, never from the text of a workflow, so that no input can become a command.
set -uo pipefail

words=("recipe=${RECIPE:?name a recipe}")
while IFS= read -r option; do
  if [[ -n $option ]]; then words+=("$option"); fi
done <<<"${OPTIONS:-}"
if [[ ${ACCEPT:-false} == true ]]; then words+=(--accept-waivers); fi

result=$(mktemp)
trap 'rm -f "$result"' EXIT
"${COMPRESS:-compress}" run "${words[@]}" --json >"$result"
code=$?

if [[ -s $result ]]; then
  read_fields='import json, sys; d = json.load(sys.stdin); print(d["output"], d["gate"]["verdict"], sep="\n")'
  { read -r output; read -r verdict; } < <(python3 -c "$read_fields" <"$result")
  printf 'output=%s\nverdict=%s\n' "$output" "$verdict" >>"${GITHUB_OUTPUT:-/dev/stdout}"
  problem="$verdict, see the step summary and $output/evidence/report.html"
else
  problem="no variant was judged, exit code $code"
fi
if [[ $code -ne 0 && ${GITHUB_ACTIONS:-} == true ]]; then echo "::error title=compress::$problem"; fi
exit "$code"
