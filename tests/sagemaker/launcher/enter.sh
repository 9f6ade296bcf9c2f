#!/bin/sh
# Inside namespaces of its own, make this machine look like one of SageMaker's containers, and start
# the program: enter.sh NAME FOLDER SHARED PROGRAM...
#   FOLDER  what becomes /opt/ml
#   SHARED  holds hosts, pam and ssh, the same for all machines
set -eu

name=$1 folder=$2 shared=$3
shift 3
hostname "$name"
mount --bind "$folder" /opt/ml
mount --bind "$shared/ssh" /etc/ssh
mount --bind "$shared/hosts" /etc/hosts
mount --bind "$shared/pam" /etc/pam.d/sshd
# the launcher writes it for those who come by ssh
touch "$folder/environment"
mount --bind "$folder/environment" /etc/environment
exec "$@"
