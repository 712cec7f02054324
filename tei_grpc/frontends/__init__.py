"""Several processes in front of the one that runs the model.

A front-end accepts calls on the shared port, validates, tokenizes and encodes replies: it is the whole server but for
the device, which is `remote_device`. The process that the user starts has the model, the queue and the permits
(`exchange`), and looks after its front-ends (`server`). Between each of them and it are a socket pair for `messages`
and shared memory for arrays (`slots`).
"""
