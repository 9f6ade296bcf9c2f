# shellcheck shell=bash
# Each task is a separate run with its own folder and batch script.
task=$SLURM_ARRAY_TASK_ID
run_folder=$(readlink "$ARRAY_FOLDER/tasks/$task") || exit 78
if [ ! -d "$run_folder/source" ]; then # an interrupted attempt may have left a partial copy
    (
        umask 077
        cd "$run_folder" && mkdir -p output checkpoints exit_records && : >> rendezvous.json &&
            rm -rf "source.$SLURM_JOB_ID" &&
            cp -a "$ARRAY_FOLDER/source" "source.$SLURM_JOB_ID" &&
            mv -T "source.$SLURM_JOB_ID" source
    )
fi
export DEPLOYKIT_ARRAY_TASK="${SLURM_ARRAY_JOB_ID}_$task"
unset "${!SLURM_ARRAY_@}"
exec bash "$run_folder/plan.sh"
