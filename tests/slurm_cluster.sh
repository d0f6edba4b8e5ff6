#!/usr/bin/env bash
# Runs a command in a Slurm cluster of two nodes, node1 and node2, on this machine:
#   tests/slurm_cluster.sh FOLDER COMMAND [ARGUMENTS]
# All daemons and jobs run in network, process, mount and host-name namespaces of their own, which end with this
# process (SIGKILL ends it at any time), and write to FOLDER only. Needs root and Debian's slurmctld, slurmd,
# slurm-client and munge.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
  exec unshare --net --pid --mount --uts --fork --kill-child --mount-proc "${BASH_SOURCE[0]}" --inside "$@"
fi
folder=$(realpath "$2")
shift 2
ip link set lo up
ip link add nodes type bridge # Slurm resolves no names where only loopback has an address
ip address add 10.77.1.1/24 dev nodes
ip address add 10.77.1.2/24 dev nodes
ip link set nodes up
hostname controller
printf '127.0.0.1 localhost\n10.77.1.1 node1 controller\n10.77.1.2 node2\n' >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

mkdir -p "$folder"/{state,spool1,spool2}
head -c 128 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=controller
SlurmUser=root
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=node1 NodeHostname=controller NodeAddr=node1 Port=17001 CPUs=2
NodeName=node2 NodeHostname=controller NodeAddr=node2 Port=17002 CPUs=2
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
END

munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" --pid-file "$folder/munged.pid" \
  --log-file "$folder/munged.log" --seed-file "$folder/munge.seed"
slurmctld -c -f "$SLURM_CONF"
slurmd -N node1 -f "$SLURM_CONF"
slurmd -N node2 -f "$SLURM_CONF"
for _ in $(seq 300); do
  [ "$(sinfo --noheader --states idle --format %D 2>/dev/null)" = 2 ] && exec "$@"
  sleep 0.2
done
tail -n 20 "$folder"/*.log
echo 'the nodes of Slurm did not start within 60 s' >&2
exit 1
