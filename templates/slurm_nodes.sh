# shellcheck shell=bash
# Each node has its own step, so losing a node does not end the other steps. The loop restarts the
# node's launcher as soon as Slurm allows it. The launchers record the end of the job in `over`.
export DEPLOYKIT_NODE_LIST="$SLURM_JOB_NODELIST"
over="$DEPLOYKIT_RUN_DIR/members/${SLURM_RESTART_COUNT:-0}/over"
run_node() {
    for _ in $(seq 100); do
        DEPLOYKIT_STEP_NODE=$1 run_step --nodes=1 --ntasks=1 --nodelist="$2" \
            --output="$DEPLOYKIT_RUN_DIR/logs/node-$1.log" --open-mode=append
        [ -e "$over" ] && return
        sleep 5
    done
}
number=0
for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    run_node "$number" "$name" &
    number=$((number + 1))
done
wait
[ -e "$over" ] && exit "$(cat "$over")"
echo "deploykit: no node could start its launcher"
exit 1
