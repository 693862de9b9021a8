#!/bin/sh
# Reward 1 for exactly the result that was asked for, else 0.
same() { # PATH TEXT: PATH is a regular file that holds TEXT and nothing else
  [ -f "$1" ] && [ ! -L "$1" ] && [ "$(cat "$1"; echo .)" = "$(printf "$2"; echo .)" ]
}
reward=0
if same /app/mido.txt 'dege\nfize\n'; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
