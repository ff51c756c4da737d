"""The prefix tree: pure bookkeeping without torch.

node, component, ledger the records: cells on nodes, a component's books, a pool's books
tree                    structure, data arriving and leaving, splits
matching, pinning       anchors and receipts
inserting, eviction     computed data in, victims out
operations              transfers between tiers, reserved then committed or aborted
"""
