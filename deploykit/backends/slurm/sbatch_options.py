"""Options of sbatch, and variables of bash, that the `slurm` section treats differently: data."""

from __future__ import annotations

NOT_SUPPORTED = "not supported"

RESERVED = {
    **dict.fromkeys(("job-name", "chdir", "output", "error", "open-mode"), NOT_SUPPORTED),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "`resources.nodes`"),
    "cpus-per-task": "`resources.cpus_per_node`",
    "mem": "`resources.memory`",
    **dict.fromkeys(("gpus", "gpus-per-node"), "`resources.gpus_per_node`"),
    "time": "`resources.time_limit`",
    "signal": "`slurm.signal_seconds`",
    **dict.fromkeys(("requeue", "no-requeue"), "`slurm.restarts`"),
    "array": "`slurm.array`",
    "mail-type": "`slurm.mail_type`",
    "mail-user": "`slurm.mail_user`",
    "kill-on-invalid-dep": "`slurm.after`",
    **dict.fromkeys(("clusters", "help", "parsable", "quiet", "test-only"), NOT_SUPPORTED),
    **dict.fromkeys(("usage", "version", "wait", "wrap"), NOT_SUPPORTED),
}
"""Options of sbatch that `slurm.extra` may not set, and what sets them instead."""

SAME_KEY = (
    *("partition", "account", "qos", "constraint", "reservation"),
    *("nodelist", "exclude", "exclusive", "licenses"),
)
"""More such options, which have a key of the same name in the `slurm` section."""

REQUIRE_VALUE = (
    *("acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "comment", "container"),
    *("container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline"),
    *("delay-boot", "dependency", "distribution", "export", "export-file", "extra"),
    *("extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus-per-socket", "gpus-per-task"),
    *("gres", "gres-flags", "hint", "input", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu"),
    *("mincpus", "network", "nodefile", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
    *("oom-kill-step", "power", "prefer", "priority", "profile", "segment", "sockets-per-node"),
    *("switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind"),
    *("tres-per-task", "uid", "wait-all-nodes", "wckey"),
)
"""Options that require a value: without one, sbatch 22.05 reads the next line as the value.

https://slurm.schedmd.com/sbatch.html
"""

BASH_VARIABLES = frozenset(
    {
        *("BASHOPTS", "BASHPID", "BASH_ARGV0", "BASH_COMMAND", "BASH_SUBSHELL", "BASH_VERSINFO"),
        *("DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS"),
        *("HISTCMD", "LINENO", "PPID", "RANDOM", "SECONDS", "SHELLOPTS"),
        *("SHLVL", "SRANDOM", "UID", "_"),
    }
)
"""Variables whose values bash sets itself, whatever a script exports."""
