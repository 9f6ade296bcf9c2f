"""What each finding of `doctor` means, by its code, for `deploykit explain`.

A finding has the same text with the ids and numbers of its job, and the exact fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_AWS, _SLURM, _LOCAL = "sagemaker", "slurm", "local"
_FIREWALL = "allow the traffic in the first security group; deploykit guide security-groups"
_SIDES = {"inbound": "into", "outbound": "out of"}


class Code(NamedTuple):
    backend: str
    meaning: str
    why: str
    """The effect on the job, or why the finding may be harmless."""
    fix: str


CODES: Mapping[str, Code] = {
    # account
    "credentials": Code(
        _AWS,
        "no valid AWS credentials",
        "nothing about the account could be checked, and no job can be sent",
        "log in again (aws sso login, or new keys); check with: aws sts get-caller-identity",
    ),
    "role_account": Code(
        _AWS,
        "the role belongs to another account than your credentials",
        "AWS refuses a role of another account",
        "log in to the role's account, or use a role of yours in sagemaker.role",
    ),
    "role_not_found": Code(
        _AWS,
        "the account has no role of this name",
        "the request is refused",
        "correct sagemaker.role, or create the role: deploykit infra render",
    ),
    "role_trust": Code(
        _AWS,
        "SageMaker cannot assume the role: its trust policy does not name the service",
        "the request is refused",
        "add sagemaker.amazonaws.com to the role's trust policy",
    ),
    "role_permissions": Code(
        _AWS,
        "no policy of the role allows actions that the job needs",
        "the job fails when it first needs one of them, often while it downloads its data",
        "allow exactly the listed actions in a policy of the role",
    ),
    "role_permissions_kms": Code(
        _AWS,
        "no policy of the role allows the use of a KMS key",
        "the job fails, unless the policy of the key itself allows the role",
        "allow the actions in a policy of the role, or the role in the policy of the key",
    ),
    "role_permissions_ssmmessages": Code(
        _AWS,
        "no policy of the role allows sessions in the containers",
        "the job runs, but sagemaker.remote_debug has no effect",
        "allow ssmmessages in a policy of the role",
    ),
    "role_denied": Code(
        _AWS,
        "a Deny in a policy of the role, or its permissions boundary, forbids an action",
        "a Deny overrides any Allow, so the job fails when it needs the action",
        "remove the action from the Deny, or add it to the boundary",
    ),
    "role_conditions": Code(
        _AWS,
        "the role may do what the job needs only under conditions, which are not evaluated",
        "the job fails if one of them does not hold",
        "compare the conditions of the policy with the job",
    ),
    "bucket_not_found": Code(
        _AWS,
        "a bucket of the job does not exist",
        "neither the source nor data can be uploaded or read",
        "correct its name, or create the bucket",
    ),
    "bucket_region": Code(
        _AWS,
        "a bucket is in another region than the job",
        "SageMaker reads data and writes results in the job's region only",
        "copy the data to a bucket in the job's region",
    ),
    "quota": Code(
        _AWS,
        "the job requests more instances than the quota for their type",
        "the request is refused with ResourceLimitExceeded",
        "request an increase, which can take days, or use fewer or other instances",
    ),
    "not_permitted": Code(
        _AWS,
        "your credentials may not query something, so it was not checked",
        "the job may be in order nevertheless",
        "ask for the listed read permissions, or have a colleague save the facts (--save)",
    ),
    "not_answered": Code(
        _AWS,
        "AWS did not answer a query, so it was not checked",
        "the job may be in order nevertheless",
        "check the network and the proxy of this machine, then run `doctor` again",
    ),
    "not_saved": Code(
        _AWS,
        "the folder of saved facts has no answer to a query, so it was not checked",
        "the job may be in order nevertheless",
        "save the facts again with the settings of this job: deploykit doctor --save FOLDER",
    ),
    # network
    "subnet_not_found": Code(
        _AWS,
        "a subnet does not exist in this account and region",
        "the request is refused",
        "set sagemaker.subnets to subnets that exist in this account and region",
    ),
    "subnet_vpcs": Code(
        _AWS,
        "the subnets are in different VPCs",
        "a job runs in one VPC, so the request is refused",
        "list subnets of one VPC in sagemaker.subnets",
    ),
    "subnet_zones": Code(
        _AWS,
        "the subnets are in different zones, or the job uses EFA in several subnets",
        "traffic across zones is slower and billed; EFA traffic cannot leave its subnet",
        "keep the subnets of one zone; with EFA, one subnet",
    ),
    "subnet_full": Code(
        _AWS,
        "the subnets have too few free addresses for the nodes",
        "the instances cannot be started",
        "use a larger subnet, or delete network interfaces that nothing uses",
    ),
    "vpc_tenancy": Code(
        _AWS,
        "the VPC has dedicated tenancy",
        "SageMaker does not support it",
        "set its tenancy to default; running instances are not changed",
    ),
    "vpc_dns": Code(
        _AWS,
        "DNS, or DNS host names, are off in the VPC",
        "no host name resolves, or those of AWS services not to the endpoints of the VPC",
        "turn on enableDnsSupport and enableDnsHostnames",
    ),
    "group_not_found": Code(
        _AWS,
        "a security group does not exist in this account and region",
        "the request is refused",
        "correct sagemaker.security_group_ids",
    ),
    "group_vpc": Code(
        _AWS,
        "a security group is in another VPC than the subnets",
        "the request is refused",
        "list security groups of the subnets' VPC",
    ),
    "s3_outbound": Code(
        _AWS,
        "the security groups block HTTPS to S3",
        "the job cannot download its source and data",
        "allow tcp 443 to the prefix list of S3, or to any address",
    ),
    "s3_route": Code(
        _AWS,
        "there is no route from a subnet to S3",
        "the job fails with `Data download failed`",
        "add a gateway endpoint for S3 to the route tables of the subnets",
    ),
    "nat_broken": Code(
        _AWS,
        "the route to the internet leads to a NAT gateway that does not work",
        "packages, and S3 without an endpoint, cannot be reached",
        "repair the route of the NAT gateway, or use a gateway endpoint for S3",
    ),
    "no_endpoint": Code(
        _AWS,
        "the subnets have no internet access, and the VPC has no endpoint for a service",
        "connections to it time out; training needs only S3, and secrets their own service",
        "add an interface endpoint for it, or a NAT gateway",
    ),
    "endpoint_policy": Code(
        _AWS,
        "the policy of an endpoint does not allow what the job does there",
        "the job fails with an access error although its role is allowed",
        "allow the job's buckets in the policy of the endpoint",
    ),
    "endpoint_dns": Code(
        _AWS,
        "private DNS of an endpoint is off",
        "the name of the service does not resolve to the endpoint, so it is not used",
        "turn on private DNS of the endpoint",
    ),
    "endpoint_blocked": Code(
        _AWS,
        "the security groups of an endpoint block tcp 443 from the job",
        "requests to the service time out",
        "allow tcp 443 from the job's security group in the groups of the endpoint",
    ),
    **{
        f"peers_{way}": Code(
            _AWS,
            f"the security groups block TCP {to} the nodes of the job, from each other",
            "init_process_group times out; NCCL and Gloo listen on any port from 32768 on",
            _FIREWALL,
        )
        for way, to in _SIDES.items()
    },
    **{
        f"efa_{way}": Code(
            _AWS,
            f"no rule of the security groups allows all traffic {to} the group itself",
            "a rule for CIDR blocks does not match EFA traffic, so the nodes cannot use EFA",
            _FIREWALL,
        )
        for way, to in _SIDES.items()
    },
    **{
        f"encryption_{way}": Code(
            _AWS,
            f"the security groups block udp 500 and protocol 50 {to} the nodes",
            "inter-container traffic encryption needs both",
            _FIREWALL,
        )
        for way, to in _SIDES.items()
    },
    **{
        f"acl_{way}": Code(
            _AWS,
            f"a network ACL blocks traffic {to} a subnet of the job",
            "ACLs are stateless: requests and responses each need a rule",
            "allow the listed ports in the ACL, with a lower number than the rule that denies",
        )
        for way, to in _SIDES.items()
    },
    # Slurm
    "site_rejects": Code(
        _SLURM,
        "the cluster would refuse the job, or never start it",
        "a limit, a partition or a node type does not fit what the job requests",
        "change the setting that the finding names in the job file",
    ),
    "site_waits": Code(
        _SLURM,
        "the cluster may start the job late, or not as requested",
        "the job is accepted",
        "change the setting that the finding names, or wait",
    ),
    "folder_local": Code(
        _SLURM,
        "the folder of the runs seems to be on a local disk of this host",
        "nodes that cannot read it start nothing",
        "choose a folder that all nodes share: DEPLOYKIT_HOME, or slurm.folder over ssh",
    ),
    "preemption": Code(
        _SLURM,
        "jobs in this partition may be preempted",
        "the run is requeued and resumes from its newest checkpoint",
        "set `checkpoints` to a folder, and resume from it",
    ),
    "no_accounting": Code(
        _SLURM,
        "the cluster has no accounting database",
        "sacct returns nothing; deploykit does not need it",
        "nothing to do",
    ),
    "login_node_programs": Code(
        _SLURM,
        "programs that deploykit starts on the login node are missing there",
        "no job can be sent to slurm.host",
        "choose another slurm.host, or load them in its shell start-up files",
    ),
    "login_node_folder": Code(
        _SLURM,
        "you cannot write to the folder for runs on the login node",
        "no job can be sent to slurm.host",
        "set slurm.folder to a folder that you can write to and that all nodes share",
    ),
    "login_node_python": Code(
        _SLURM,
        "the job's Python is missing or too old on the login node",
        "the nodes need Python 3.10 or later with PyTorch; they may have it nevertheless",
        "set slurm.python, or another environment of the job",
    ),
    # this machine
    "torch_missing": Code(
        _LOCAL,
        "the trainer's Python cannot import PyTorch",
        "each rank fails at once",
        "install PyTorch there, or set local.python",
    ),
    "gpus_unused": Code(
        _LOCAL,
        "this host has more GPUs than PyTorch can use",
        "the job trains on fewer GPUs, or on the CPU",
        "install a PyTorch build for the driver's CUDA version; check CUDA_VISIBLE_DEVICES",
    ),
    "gpus_too_few": Code(
        _LOCAL,
        "the job requests more GPUs than this host has",
        "ranks without a GPU train on the CPU",
        "request fewer in resources.gpus_per_node",
    ),
    "shm_small": Code(
        _LOCAL,
        "little is free in /dev/shm, where loader workers share tensors",
        "a full /dev/shm kills the workers with a bus error",
        "free it, remount it larger, or use fewer workers",
    ),
    "memlock": Code(
        _LOCAL,
        "the limit of locked memory is too low for InfiniBand",
        "NCCL fails in ibv_reg_mr",
        "raise the limit: ulimit -l unlimited",
    ),
    "limit": Code(
        _LOCAL,
        "the limit of open files or processes is too low for the ranks",
        "a rank fails when it opens one more",
        "raise it in the shell that submits: ulimit -n, ulimit -u",
    ),
    "loopback_down": Code(
        _LOCAL,
        "the loopback interface is down",
        "ranks on this machine cannot connect to each other",
        "ip link set lo up",
    ),
    "host_name": Code(
        _LOCAL,
        "the name of this host does not resolve",
        "Gloo prints a warning and uses loopback",
        "add the name to /etc/hosts",
    ),
}
