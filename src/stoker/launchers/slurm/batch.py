"""The constant parts of the batch script: run a slot as a task, and restart the gang while retries are left.

Slurm sends a signal to every process of a task, so the function that runs a slot only has to outlive the program. The
batch shell gets USR1 before the time limit, USR2 from `stoker job stop`, and TERM when Slurm itself ends the job. A
SIGTERM to srun would kill its tasks at once; `scancel --signal` reaches the programs instead.
"""

from __future__ import annotations

from stoker.errors import InputError, MissingError

RECORDS = "slurm.records"
"""Records of the script in the run folder; see `records`."""
STEP_TIMEOUT_S = 60
"""How long srun waits until the nodes of the job can run its step; without a limit, it would wait forever."""
NOT_RETRIED_CODES = (InputError.exit_code, MissingError.exit_code)
LIMIT_REASON = "the time limit was reached"
REQUEUE_REASON = "Slurm requeued the job: it was preempted, or a node failed"

RUN_SLOT = """\
  unset -f run_slot signal_processes
  log=$run/logs/$STOKER_ROLE-$STOKER_INDEX.$STOKER_ATTEMPT.log
  trap 'is_stopping=1; { sleep "$STOKER_GRACE_S"; kill -KILL "$pid"; } >/dev/null 2>&1 &' TERM
  {
    cd -- "$directory" || exit
    if type -P -- "${command[0]}" >/dev/null; then exec "${command[@]}"; fi
    echo "stoker: cannot start the program '${command[0]}': no such file or directory"
    exit 3
  } >>"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" 2>/dev/null; done # a signal interrupts wait
  wait "$pid" 2>/dev/null
  code=$?
  local record=exit.$STOKER_ATTEMPT.$STOKER_ROLE-$STOKER_INDEX
  echo "$code" >"$run/.$record" && mv "$run/.$record" "$run/$record"
  # With another exit code srun kills the gang: not for an observer, nor while others write a last checkpoint.
  if [ -n "$is_observer$is_stopping" ]; then exit 0; fi
  exit "$code"
}
"""

BATCH = f"""\
run=$(realpath -- "${{1:?usage: sbatch SCRIPT RUN_FOLDER}}") || exit
mkdir -p "$run/logs" && cd "$run" || exit
export STOKER_RUN=${{run##*/}} STOKER_CHECKPOINT_DIR=${{STOKER_CHECKPOINT_DIR:-$run/checkpoints}}
export OMPI_MCA_plm_slurm_args="--immediate={STEP_TIMEOUT_S} $OMPI_MCA_plm_slurm_args" # for the srun of mpirun
export -f run_slot
reason='' signalled=''
trap 'reason=limit' USR1
trap 'reason=stopped' USR2
trap 'reason=interrupted signalled=1' TERM

record() {{ echo "$(date +%s.%N) $*" >>{RECORDS}; }}

finish() {{ # STATE CODE
  record finished "$1" "$SLURM_JOB_ID"
  exit "$2"
}}

list_hosts() {{ # the node of every task, in the order of --distribution=block
  local names=($(scontrol show hostnames "$SLURM_JOB_NODELIST")) counts=(${{SLURM_TASKS_PER_NODE//,/ }})
  local node=0 item count repeats
  hosts=()
  for item in "${{counts[@]}}"; do # 2(x3) means two tasks on each of three nodes
    count=${{item%%(*}} repeats=1
    [[ $item != *x* ]] || {{ repeats=${{item##*x}} && repeats=${{repeats%)}}; }}
    for ((; repeats > 0; repeats--, node++)); do
      for ((i = 0; i < count; i++)); do hosts+=("${{names[node]}}"); done
    done
  done
}}

is_lead_done() {{ # whether the slots of the lead role have succeeded, while others may still run
  [ -n "$lead" ] && [ "$(cat exit."$attempt.$lead"-* 2>/dev/null | grep -cx 0)" = "$lead_slots" ]
}}

signal_processes() {{ # SIGNAL PREFIX PATTERN...: processes of the run on this node; prefix -: their process groups
  local signal=$1 prefix=$2 files pattern file
  files=$(echo /proc/[0-9]*/environ)
  for pattern in "STOKER_RUN=$STOKER_RUN" "SLURMD_NODENAME=$SLURMD_NODENAME" "${{@:3}}"; do
    files=$(grep -lzxs -e "$pattern" -- $files /dev/null)
  done
  for file in $files; do kill "-$signal" -- "$prefix$(basename "${{file%/environ}}")" 2>/dev/null; done
}}
export -f signal_processes

is_step_overdue() {{ # whether no program has started in all the time that srun was given
  ((SECONDS - step_began >= {STEP_TIMEOUT_S})) && ! compgen -G "logs/${{is_mpi:+worker-}}*.$attempt.log" >/dev/null
}}

on_all_nodes() {{
  local nodes=$SLURM_JOB_NUM_NODES
  timeout 30 srun --overlap --mem=0 --input=none --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \\
    bash -c 'signal_processes "$@"' stoker "$@"
}}

terminate() {{
  if [ -z "$is_mpi" ]; then
    scancel --signal=TERM "$SLURM_JOB_ID"
  else # mpirun and its daemons kill the ranks soon after a SIGTERM; each rank leads a process group
    on_all_nodes TERM - 'OMPI_COMM_WORLD_RANK=.*'
    kill -TERM "$step"
  fi
}}

has_step() {{ squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q '\\.[0-9]'; }}

watch_step() {{
  while kill -0 "$step" 2>/dev/null; do
    if [ -z "$reason" ] && ! is_lead_done; then
      if ((lead_slots && lead_slots < slots)); then sleep 1 & wait $!; else wait "$step"; fi
    elif [ -z "$signalled" ] && has_step; then
      signalled=1
      terminate
    else
      sleep 0.2 & wait $!
    fi
  done
  wait "$step"
  code=$?
  # What slots have left behind must not disturb the next attempt; Slurm finds such processes only with cgroups.
  case $reason in '' | stopped) on_all_nodes KILL '' 'STOKER_SLOT=.*' ;; esac # there is no time at the time limit
}}

find_failure() {{ # the exit code of the slot that failed first; 0 if none has
  local file slot
  for file in $(ls -tr exit."$attempt".* 2>/dev/null); do
    slot=${{file##*.}} failed_code=$(cat "$file")
    if [ "$failed_code" != 0 ] && [[ " $observers " != *" ${{slot%-*}} "* ]]; then return; fi
  done
  failed_code=$code # srun has killed the task that failed, or could not start one
}}

list_hosts
while :; do
  attempt=$(grep -c ' began ' {RECORDS} 2>/dev/null)
  attempt=${{attempt:-0}}
  export STOKER_ATTEMPT=$attempt
  port=${{fixed_port:-$((20000 + (SLURM_JOB_ID * 32 + attempt * slots) % 10000))}}
  record began "$attempt" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"
  step_began=$SECONDS
  if [ -n "$is_mpi" ]; then
    run_slot "$run" "$port" "${{hosts[@]}}" &
  else
    srun --kill-on-bad-exit=1 --wait=0 --distribution=block --input=none --immediate={STEP_TIMEOUT_S} \\
      ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
      bash -c 'run_slot "$@"' stoker "$run" "$port" "${{hosts[@]}}" &
  fi
  step=$! signalled=''
  watch_step
  if [ -n "$reason" ]; then
    record ended "$attempt" "$reason" 0 "$SLURM_JOB_ID"
  elif is_lead_done || {{ find_failure && [ "$failed_code" = 0 ]; }}; then
    record ended "$attempt" succeeded 0 "$SLURM_JOB_ID"
    finish succeeded 0
  else
    record ended "$attempt" failed "$failed_code" "$SLURM_JOB_ID"
    case $failed_code in {"|".join(map(str, NOT_RETRIED_CODES))}) finish failed "$failed_code" ;; esac
    failures=$(grep -c " failed [0-9]* $SLURM_JOB_ID\\$" {RECORDS})
    if ((failures > retries)); then finish failed "$failed_code"; fi
    # A node may have returned too early for Slurm to start steps on it again; a new allocation has all of its nodes.
    if is_step_overdue && scontrol requeue "$SLURM_JOB_ID"; then exit 143; fi
    pause=$((failures > ${{#backoff[@]}} ? ${{#backoff[@]}} : failures))
    for ((i = 0; i < backoff[pause - 1] * 5; i++)); do
      if [ -n "$reason" ]; then break; fi
      sleep 0.2 & wait $!
    done
  fi
  case $reason in
    stopped) finish stopped 143 ;;
    limit) scontrol requeue "$SLURM_JOB_ID" && exit 143 || finish limit 143 ;;
    interrupted) exit 143 ;;
  esac
done
"""
