#!/bin/sh
# Inside new namespaces, set up the files of a SageMaker container and start the program:
# enter.sh NAME FOLDER SHARED PROGRAM...
#   FOLDER  mounted at /opt/ml
#   SHARED  holds hosts, pam and ssh, which are the same for all hosts
set -eu

name=$1 folder=$2 shared=$3
shift 3
hostname "$name"
mount --bind "$folder" /opt/ml
mount --bind "$shared/ssh" /etc/ssh
mount --bind "$shared/hosts" /etc/hosts
mount --bind "$shared/pam" /etc/pam.d/sshd
# the launcher writes it for ssh sessions
touch "$folder/environment"
mount --bind "$folder/environment" /etc/environment
exec "$@"
