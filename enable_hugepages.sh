#!/usr/bin/env bash
# Turn on transparent hugepages, which speed up TPU runtime start-up and transfers (TPU v5e and newer).
#   ./enable_hugepages.sh --check     print the state and change nothing; exit code 0 if they are on, 1 if not
#   sudo ./enable_hugepages.sh        turn them on until the next boot
# FILE, the last argument, replaces the kernel's switch. No script of this project runs this one.
set -euo pipefail

check=false
if [[ "${1:-}" == --check ]]; then
  check=true
  shift
fi
if [[ $# -gt 1 || "${1:-}" == -* ]]; then
  echo "usage: $0 [--check] [FILE]" >&2
  exit 2
fi
switch="${1:-/sys/kernel/mm/transparent_hugepage/enabled}"

# The file reads e.g. "always [madvise] never"; the word in brackets is the current state.
state() { sed 's/.*\[\([a-z]*\)\].*/\1/' "$switch"; }

if [[ ! -r "$switch" ]]; then
  echo "transparent hugepages: $switch does not exist (not Linux, or a container that hides it); nothing to change" >&2
  exit 1
fi
echo "transparent hugepages: $(state)"
if [[ "$(state)" == always ]]; then
  echo "already on"
  exit 0
fi
if $check; then
  echo "turn them on with: sudo ./enable_hugepages.sh"
  exit 1
fi
if [[ ! -w "$switch" ]]; then
  echo "no permission to write $switch; run: sudo ./enable_hugepages.sh" >&2
  exit 1
fi
if ! echo always >"$switch" || [[ "$(state)" != always ]]; then
  echo "the kernel ignored the change: the state is still $(state); in a container, run this on the host" >&2
  exit 1
fi
echo "turned on until the next boot: $(state)"
