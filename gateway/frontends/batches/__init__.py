"""OpenAI's Batch API: files of requests, and batches that run them: ``/v1/files`` and ``/v1/batches``.

A batch lies in a folder of ``--batch-dir``, which several gateways may share. The gateway that holds the lock
of a batch's folder runs its lines (`runner`). A lock ends with its process; then another gateway, or the same
one after a restart, goes on with the lines that have no result yet (`store`). So each line has one result.

Source: https://platform.openai.com/docs/api-reference/batch and /files.
"""
