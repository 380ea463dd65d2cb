#!/bin/sh
# Play a plan in parts, two at a time, without Ray, and merge the parts. A part that was cut off goes on when the script
# is run again.
#   evaluate_in_parts.sh TASK EPISODES PER_PART DIRECTORY [options of headrace evaluate]
set -e
task=$1 episodes=$2 size=$3 directory=$4
shift 4
mkdir -p "$directory"
seq 0 "$size" $((episodes - 1)) | xargs -P 2 -I{} sh -c '
  first=$1 end=$(($1 + $2)) most=$3 directory=$4 task=$5
  shift 5
  [ "$end" -le "$most" ] || end=$most
  exec headrace evaluate "$task" --episode-ids "$first:$end" --journal "$directory/$first.jsonl" --resume "$@"
' part {} "$size" "$episodes" "$directory" "$task" "$@"
exec headrace merge "$directory"/*.jsonl
