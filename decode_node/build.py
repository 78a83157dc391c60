"""Builds the transfer agent of a decode rank from its options and its context."""

from __future__ import annotations

from decode_node.landing import Landing
from decode_node.messages import ReceiverMessages
from decode_node.options import ReceiverContext, ReceiverOptions
from decode_node.probe import ProbeReceiver
from decode_node.receiver import ReceiverParts, SegmentReceiver
from decode_node.repairs import Repairs
from decode_node.ring import ReceiveRing
from decode_node.tickets import IncomingTickets
from decode_node.verifier import Verifier
from decode_node.writes import PeerWrites
from disagg.node.device import DeviceQueue, device_name
from disagg.node.sums import Sums
from transport.control import messages as m


def build_receiver(options: ReceiverOptions, context: ReceiverContext) -> SegmentReceiver:
    """Constructs a receiver, connects its parts, and registers the ring's memory with the transport."""
    device, transport = context.pool.device, context.transport
    queue, sums = DeviceQueue(device), Sums(device) if options.checksum else None
    messages = ReceiverMessages(transport, context.send)
    tickets = IncomingTickets(context, messages, checksum=options.checksum)
    repairs = Repairs(context, tickets)
    ring = ReceiveRing(options, context, tickets, messages)
    transport.register(ring.buffer.memory)
    landing = Landing(context, queue, sums, ring, tickets, repairs)
    verifier = Verifier(context, queue, sums, tickets, repairs)
    writes = PeerWrites(options, context, tickets, verifier)
    probes = ProbeReceiver(
        transport,
        ring.buffer,
        ring.allocator,
        device_name(device),
        send=messages.send,
        offered=writes.offered_to,
        freed=ring.send_watermarks,
        clock=context.clock,
    )
    messages.on(m.LeaseRequest, ring.on_lease_request)
    messages.on(m.ProbeRequest, probes.on_request)
    messages.on(m.ProbeEnded, probes.on_ended)
    messages.on_failure(m.LeaseGrant, tickets.grant_failed)
    messages.on_failure(m.TransferVerified, tickets.verified_failed)
    parts = ReceiverParts(queue, sums, messages, tickets, repairs, ring, landing, verifier, writes, probes)
    return SegmentReceiver(options, context, parts)
