# shellcheck shell=bash
# If a node restarts, srun kills the launchers on the other nodes before they can record the reason.
# This script then requeues the job. The slurmd of a restarted node started after this script.
begun=$(date -u +%FT%T)
trap stopped=1 TERM
trap requeue_after_a_restart EXIT
requeue_after_a_restart() {
    [ $? = 0 ] || [ -n "$stopped" ] && return
    attempt=${SLURM_RESTART_COUNT:-0} restart=$((${SLURM_RESTART_COUNT:-0} + 1))
    records=$DEPLOYKIT_RUN_DIR/exit_records
    [ -s "$records/decision-$attempt" ] && return
    TZ=UTC0 SLURM_TIME_FORMAT=standard scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
        sed -n 's/^NodeName=\([^ ]*\) .* SlurmdStartTime=\([0-9T:-]*\) .*/\2 \1/p' |
        while read -r started node; do
            [[ $started > $begun ]] || continue
            echo "deploykit: node $node was restarted and lost its part of the job; requeuing the job"
            (umask 077; printf '{"restart": %d, "why": "node_failure", "time": "%sZ"}\n' \
                $restart "$(date -u +%FT%T)" > "$records/restart-$restart.json")
            scontrol requeue "$SLURM_JOB_ID" || rm -f "$records/restart-$restart.json"
            break
        done
}
