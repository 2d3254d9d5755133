#!/usr/bin/env bash
# Transparent hugepages make the start of the TPU runtime and its transfers faster (TPU v5e and newer).
#   ./enable_hugepages.sh --check     print the state; exit 0 if they are on, 1 if not; change nothing
#   sudo ./enable_hugepages.sh        turn them on until the next boot
# A last argument names another file than the kernel's switch. No script of this project calls this one.
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

# The kernel writes "always [madvise] never": the word in brackets is the state.
state() { sed 's/.*\[\([a-z]*\)\].*/\1/' "$switch"; }

if [[ ! -r "$switch" ]]; then
  echo "transparent hugepages: no $switch here (not Linux, or a container that hides it); nothing to change" >&2
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
  echo "no right to write $switch; run: sudo ./enable_hugepages.sh" >&2
  exit 1
fi
if ! echo always >"$switch" || [[ "$(state)" != always ]]; then
  echo "the kernel did not take it: the state is still $(state); a container needs its host to do this" >&2
  exit 1
fi
echo "turned on until the next boot: $(state)"
