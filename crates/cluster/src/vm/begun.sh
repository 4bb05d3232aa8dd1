#!/bin/busybox sh
# Tells that what was started has begun its work.
read -r now rest </proc/uptime
echo "begun $now" >&4
