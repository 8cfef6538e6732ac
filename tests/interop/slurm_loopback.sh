#!/bin/bash
# Starts a Slurm cluster of this machine alone, on loopback, with all its files in one folder; for workers.py.
#
# usage: slurm_loopback.sh start DIR [CPUS]   then: export SLURM_CONF=DIR/slurm.conf
#        slurm_loopback.sh stop DIR
# Needs slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm munge), and root. CPUS (default 4) may exceed what
# the machine has. Ports: SLURM_PORT (default 16817) and the next.
set -euo pipefail
action=$1 dir=$(realpath -m "$2") cpus=${3:-4} port=${SLURM_PORT:-16817}
conf=$dir/slurm.conf
export SLURM_CONF=$conf
export PATH=$PATH:/usr/sbin

stop() {
  local name pid
  for name in slurmd slurmctld munged; do
    pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
    # The number may belong to another process by now.
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$name" ] || continue
    kill "$pid"
    for _ in $(seq 100); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
  done
}

if [ "$action" = stop ]; then
  stop
  exit
fi
[ "$action" = start ] || { sed -n '2,8s/^# \?//p' "$0" >&2; exit 2; }

mkdir -p "$dir/state" "$dir/spool" "$dir/munge"
chmod 755 "$dir" "$dir/munge"
if [ ! -f "$dir/munge.key" ]; then
  (umask 077; head -c 128 /dev/urandom > "$dir/munge.key")
fi
cat > "$conf" <<CONF
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
# No cgroups: a container has none that it may change.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 NodeHostname=$(hostname -s) CPUs=$cpus State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
CONF
stop
munged --force --key-file="$dir/munge.key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
  --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
slurmctld -c -f "$conf"
slurmd -f "$conf"
for _ in $(seq 100); do
  if sinfo -h -o %T 2>/dev/null | grep -qx idle; then
    echo "$conf"
    exit
  fi
  sleep 0.2
done
echo "slurm_loopback.sh: the node is not idle: see $dir/slurmctld.log and $dir/slurmd.log" >&2
stop
exit 1
