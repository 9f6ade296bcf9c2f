# shellcheck shell=bash
# Each array task has its own folder in the run's folder.
run_folder=$DEPLOYKIT_RUN_DIR
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    export DEPLOYKIT_RUN_DIR="$run_folder/tasks/$SLURM_ARRAY_TASK_ID"
    (
        umask 077
        mkdir -p "$DEPLOYKIT_RUN_DIR/logs" "$DEPLOYKIT_RUN_DIR/exit_records" &&
            touch "$DEPLOYKIT_RUN_DIR/rendezvous.json"
    )
fi

# The run starts once, even if an interrupted submit was repeated: the first job to start writes its
# id into the link `claim`, and only that job continues, also after a requeue.
job=${DEPLOYKIT_ARRAY_TASK:-$SLURM_JOB_ID}
ln -sn "$job" "$DEPLOYKIT_RUN_DIR/claim" 2>/dev/null
claimed_by=$(readlink "$DEPLOYKIT_RUN_DIR/claim")
if [ -z "$claimed_by" ]; then
    echo "deploykit: job $job cannot start: the run's folder is not writable on this node"
    exit 73
elif [ "$claimed_by" != "$job" ]; then
    echo "deploykit: job $claimed_by has already started this run; job $job exits"
    exit 0
fi

cd "$run_folder/source" || exit 78

# Slurm creates its log with your umask. Restrict that log, and create the node logs first, because
# Slurm does not change the mode of an existing log.
chmod -f go= "$run_folder/logs/slurm${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}.log"
(
    umask 077
    cd "$DEPLOYKIT_RUN_DIR/logs" || exit
    for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do : >> "node-$node.log"; done
)
