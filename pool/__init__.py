"""What both sides of mambapool agree on, and the processes that hold a pool's memory.

The words of the wire (:mod:`~mambapool.pool.protocol`), the errors, the geometry of a state, the
slot table, and the keepers. Imports neither the service nor the client, and no torch unless
:mod:`~mambapool.pool.state_pool` is imported.
"""
