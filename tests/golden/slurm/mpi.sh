#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --signal=B:USR1@20
#SBATCH --open-mode=append
#SBATCH --requeue

export STOKER_JOB=small
export STOKER_SAMPLING=exact
export STOKER_CHECKPOINT_KEEP=3
export STOKER_GRACE_S=5
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

retries=0 backoff=(1 5 15 30)
slots=3 lead=launcher lead_slots=1
fixed_port= observers='' is_mpi=1

run_slot() {
  local run=$1 port=$2 hosts=("${@:3}") command directory is_observer is_stopping= log pid code
  if ((SLURM_PROCID < 1)); then
    export STOKER_ROLE=launcher STOKER_INDEX=$((SLURM_PROCID - 0))
    export STOKER_SLOT=launcher/"$STOKER_INDEX"
    export MASTER_ADDR="${hosts[0]}"
    export MASTER_PORT="$port"
    export STOKER_OUTPUT="$run"'/logs/{slot}.'"$STOKER_ATTEMPT".log
    directory=/code is_observer=
    command=(mpirun -np 4 --host "${hosts[0]}":2,"${hosts[1]}":2 --tag-output --oversubscribe --bind-to none --map-by slot --mca pml ob1 --mca btl '^openib' --mca btl_tcp_if_exclude lo,docker0 --mca oob_tcp_if_exclude lo,docker0 --mca ess_base_forward_signals none -x STOKER_JOB -x STOKER_SAMPLING -x STOKER_CHECKPOINT_KEEP -x STOKER_GRACE_S -x OMP_NUM_THREADS -x PYTHONUNBUFFERED -x MASTER_ADDR -x MASTER_PORT -x STOKER_OUTPUT -x STOKER_RUN -x STOKER_ATTEMPT -x STOKER_CHECKPOINT_DIR /env/bin/python -I -S "$run"/mpi_rank.py --ranks 2 --gpus 2 --first 0 -- /env/bin/python /code/train.py)
  fi
  unset -f run_slot
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

run=$(realpath -- "${1:?usage: sbatch SCRIPT RUN_FOLDER}") || exit
mkdir -p "$run/logs" && cd "$run" || exit
export STOKER_RUN=${run##*/} STOKER_CHECKPOINT_DIR=${STOKER_CHECKPOINT_DIR:-$run/checkpoints}
export -f run_slot
reason='' signalled=''
trap 'reason=limit' USR1
trap 'reason=stopped' USR2
trap 'reason=interrupted signalled=1' TERM

record() { echo "$(date +%s.%N) $*" >>slurm.records; }

finish() { # STATE CODE
  record finished "$1" "$SLURM_JOB_ID"
  exit "$2"
}

list_hosts() { # the node of every task, in the order of --distribution=block
  local names=($(scontrol show hostnames "$SLURM_JOB_NODELIST")) counts=(${SLURM_TASKS_PER_NODE//,/ })
  local node=0 item count repeats
  hosts=()
  for item in "${counts[@]}"; do # 2(x3) means two tasks on each of three nodes
    count=${item%%(*} repeats=1
    [[ $item != *x* ]] || { repeats=${item##*x} && repeats=${repeats%)}; }
    for ((; repeats > 0; repeats--, node++)); do
      for ((i = 0; i < count; i++)); do hosts+=("${names[node]}"); done
    done
  done
}

is_lead_done() { # whether the slots of the lead role have succeeded, while others may still run
  [ -n "$lead" ] && [ "$(cat exit."$attempt.$lead"-* 2>/dev/null | grep -cx 0)" = "$lead_slots" ]
}

terminate() {
  if [ -z "$is_mpi" ]; then
    scancel --signal=TERM "$SLURM_JOB_ID"
    return
  fi
  # mpirun and its daemons kill the ranks soon after a SIGTERM, so it goes to the ranks; each leads a process group.
  local nodes=$SLURM_JOB_NUM_NODES
  srun --overlap --mem=0 --input=none --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c '
    for process in /proc/[0-9]*; do
      variables=$(tr "\0" "\n" <"$process/environ" 2>/dev/null)
      for name in "STOKER_RUN=$STOKER_RUN" "SLURMD_NODENAME=$SLURMD_NODENAME" "OMPI_COMM_WORLD_RANK=[0-9]*"; do
        grep -qx "$name" <<<"$variables" || continue 2
      done
      kill -TERM -- "-${process##*/}" 2>/dev/null
    done'
  kill -TERM "$step"
}

has_step() { squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q '\.[0-9]'; }

watch_step() {
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
}

find_failure() { # the exit code of the slot that failed first; 0 if none has
  local file slot
  for file in $(ls -tr exit."$attempt".* 2>/dev/null); do
    slot=${file##*.} failed_code=$(cat "$file")
    if [ "$failed_code" != 0 ] && [[ " $observers " != *" ${slot%-*} "* ]]; then return; fi
  done
  failed_code=$code # srun has killed the task that failed, or could not start one
}

list_hosts
while :; do
  attempt=$(grep -c ' began ' slurm.records 2>/dev/null)
  attempt=${attempt:-0}
  export STOKER_ATTEMPT=$attempt
  port=${fixed_port:-$((20000 + (SLURM_JOB_ID * 32 + attempt * slots) % 10000))}
  record began "$attempt" "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"
  if [ -n "$is_mpi" ]; then
    run_slot "$run" "$port" "${hosts[@]}" &
  else
    srun --kill-on-bad-exit=1 --wait=0 --distribution=block --input=none \
      ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
      bash -c 'run_slot "$@"' stoker "$run" "$port" "${hosts[@]}" &
  fi
  step=$! signalled=''
  watch_step
  if [ -n "$reason" ]; then
    record ended "$attempt" "$reason" 0 "$SLURM_JOB_ID"
  elif is_lead_done || { find_failure && [ "$failed_code" = 0 ]; }; then
    record ended "$attempt" succeeded 0 "$SLURM_JOB_ID"
    finish succeeded 0
  else
    record ended "$attempt" failed "$failed_code" "$SLURM_JOB_ID"
    case $failed_code in 2|3) finish failed "$failed_code" ;; esac
    failures=$(grep -c " failed [0-9]* $SLURM_JOB_ID\$" slurm.records)
    if ((failures > retries)); then finish failed "$failed_code"; fi
    pause=$((failures > ${#backoff[@]} ? ${#backoff[@]} : failures))
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
