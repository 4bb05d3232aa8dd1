#!/bin/busybox sh
# First process of a guest that has clients: takes requests from one virtio port, and tells on
# another one what happens.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
exec </dev/ttyS0 >/dev/ttyS0 2>&1
while read -r module; do
  insmod "/modules/$module" || { echo "cannot load $module"; poweroff -f; }
done </modules/order
until ls /dev/vport*p2 >/dev/null 2>&1; do sleep 0.1; done
set -- /dev/vport*p1 /dev/vport*p2
exec 3<>"$1" 4>"$2"
: >/tmp/nothing

# Answers with a file, behind its length on a line.
answer() {
  if [ -r "$1" ]; then
    wc -c <"$1" >&3
    cat "$1" >&3
  else
    echo none >&3
  fi
}

# Answers with what a command prints, which is short.
tell() {
  "$@" >/tmp/told 2>&1
  answer /tmp/told
}

# Starts a command in a directory of its own, and tells when it has ended.
start() {
  rm -rf /tmp/run /tmp/output /tmp/errors /tmp/pid
  mkdir /tmp/run
  cd /tmp/run || return
  (
    "$@" >/tmp/output 2>/tmp/errors &
    echo $! >/tmp/pid
    wait $!
    status=$?
    read -r now rest </proc/uptime
    echo "ended $status $now" >&4
  ) &
  until [ -s /tmp/pid ]; do sleep 0.01; done
  answer /tmp/nothing
}

# Sends a signal to what was started.
send() {
  kill "-$1" "$(cat /tmp/pid)"
  answer /tmp/nothing
}

echo ready >&4
while read -r line <&3; do eval "$line"; done
poweroff -f
