//! What is refused: pipelines that there cannot be, and actions that do not fit each other.

use unsloth::ffi::pipeline::*;
use unsloth::ffi::status::*;
use unsloth::training::pipeline::{Action, Costs, Kind, Params, Schedule, Step, simulate};

use super::actions;
use crate::common::abi::assert_fails;

const P: Params = Params {
    kind: Kind::OneFOneB,
    stages: 2,
    micro_batches: 3,
    chunks: 0,
};

#[test]
fn pipelines_that_cannot_be_are_refused() {
    let with = |spoil: fn(&mut Params)| {
        let mut p = P;
        spoil(&mut p);
        p
    };
    let cases = [
        (with(|p| p.stages = 0), "stages is 0, allowed: 1 to 1024"),
        (
            with(|p| p.stages = 1025),
            "stages is 1025, allowed: 1 to 1024",
        ),
        (
            with(|p| p.micro_batches = 0),
            "micro_batches is 0, allowed with stages 2 and chunks 1: 1 to 524288",
        ),
        (
            with(|p| p.micro_batches = usize::MAX),
            "micro_batches is 18446744073709551615, allowed with stages 2 and chunks 1: 1 to 524288",
        ),
        (
            with(|p| p.chunks = 2),
            "chunks is 2, allowed unless interleaved: 1",
        ),
        (
            with(|p| p.kind = Kind::Interleaved),
            "chunks is 1, allowed interleaved: 2 to 1024",
        ),
        (
            with(|p| (p.kind, p.chunks) = (Kind::Interleaved, 1025)),
            "chunks is 1025, allowed interleaved: 2 to 1024",
        ),
        (
            with(|p| (p.kind, p.chunks) = (Kind::Interleaved, 2)),
            "micro_batches is 3, a multiple of stages 2 is needed interleaved",
        ),
    ];
    for (p, expected) in cases {
        let error = Schedule::new(&p).unwrap_err();
        assert_eq!(error.to_string(), format!("pipeline_schedule: {expected}"));
        let error = simulate(&p, &[[]; 2], &Costs::default()).unwrap_err();
        assert_eq!(error.to_string(), format!("pipeline_simulate: {expected}"));
    }
    let schedule = Schedule::new(&P).unwrap();
    let errors = [
        schedule.actions(2).unwrap_err(),
        schedule.num_actions(2).unwrap_err(),
        schedule.num_slots(2).unwrap_err(),
    ];
    for error in errors {
        let expected = "pipeline_schedule: rank is 2, allowed: 0 to 1";
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn costs_that_are_no_times_are_refused() {
    type Field = fn(&mut Costs) -> &mut f64;
    for value in [-1.0, f64::NAN, f64::INFINITY, 1.1e18] {
        let cases: [(&str, Field); 4] = [
            ("forward", |c| &mut c.forward),
            ("backward_input", |c| &mut c.backward_input),
            ("backward_weight", |c| &mut c.backward_weight),
            ("transfer", |c| &mut c.transfer),
        ];
        for (name, field) in cases {
            let mut costs = Costs::default();
            *field(&mut costs) = value;
            let error = Schedule::new(&P).unwrap().simulate(&costs).unwrap_err();
            let expected = format!("pipeline_simulate: {name} is {value}, allowed: 0 to 1e18");
            assert_eq!(error.to_string(), expected);
        }
    }
    let costs = Costs {
        activation_bytes: u64::MAX / 2 + 1,
        ..Costs::default()
    };
    let error = Schedule::new(&P).unwrap().simulate(&costs).unwrap_err();
    let expected = "pipeline_simulate: activation_bytes is 9223372036854775808: what a rank holds \
                    passes 64 bits";
    assert_eq!(error.to_string(), expected);
}

/// A caller's own actions, in one way or another wrong.
#[test]
fn actions_that_do_not_fit_are_refused() {
    type Spoil = fn(&mut Vec<Vec<Action>>);
    // Rank 0: F0 [send] F1 [send, receive] B0 [send, receive] ...
    let cases: [(Spoil, &str); 12] = [
        (|ranks| drop(ranks.pop()), "has 1 lists, stages is 2"),
        (
            |ranks| ranks[0][0].micro_batch = 3,
            "have Forward of micro_batch 3 in chunk 0 as action 0 of rank 0, which is of none that there is",
        ),
        (
            |ranks| ranks[0][0].chunk = 1,
            "have Forward of micro_batch 0 in chunk 1 as action 0 of rank 0, which is of none that there is",
        ),
        (
            |ranks| ranks[0][0].peer = Some(1),
            "have Forward of micro_batch 0 in chunk 0 as action 0 of rank 0, which has another peer than \
             there is",
        ),
        (
            |ranks| ranks[0][1].peer = Some(0),
            "have SendActivation of micro_batch 0 in chunk 0 as action 1 of rank 0, which has another peer \
             than there is",
        ),
        (
            |ranks| ranks[0][1].step = Step::SendGradient,
            "have SendGradient of micro_batch 0 in chunk 0 as action 1 of rank 0, which has another peer \
             than there is",
        ),
        (
            |ranks| ranks[0][1].joined = true,
            "have SendActivation of micro_batch 0 in chunk 0 as action 1 of rank 0, which is joined with \
             what is not one transfer in the other direction",
        ),
        (
            |ranks| ranks[0][2] = ranks[0][0],
            "have Forward of micro_batch 0 in chunk 0 as action 2 of rank 0, which is there for the second \
             time",
        ),
        (
            |ranks| ranks[1][0].micro_batch = 1,
            "have ReceiveActivation of micro_batch 1 in chunk 0 as action 0 of rank 1, which meets \
             SendActivation of micro_batch 0 of rank 0",
        ),
        // The activation comes too late for the pass.
        (
            |ranks| ranks[1].swap(0, 1),
            "have SendActivation of micro_batch 0 in chunk 0 as action 1 of rank 0, which waits for ever",
        ),
        // The other side is missing.
        (
            |ranks| ranks[1].retain(|a| a.step != Step::ReceiveActivation),
            "have SendActivation of micro_batch 0 in chunk 0 as action 1 of rank 0, which waits for ever",
        ),
        (
            |ranks| ranks.iter_mut().for_each(Vec::clear),
            "have not all passes of micro_batch 0 in chunk 0 of rank 0",
        ),
    ];
    for (spoil, expected) in cases {
        let mut ranks = actions(&P);
        simulate(&P, &ranks, &Costs::default()).unwrap();
        spoil(&mut ranks);
        let error = simulate(&P, &ranks, &Costs::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("pipeline_simulate: ranks {expected}")
        );
    }
}

/// Both ranks send before they receive: without joining them, nobody's call is ever over.
#[test]
fn a_circle_of_calls_is_found() {
    let mut ranks = actions(&P);
    let both = ranks[0].iter().position(|a| a.joined).unwrap();
    assert!(ranks[0][both].step.is_send());
    let meeting = ranks[1].iter().position(|a| a.joined).unwrap();
    assert!(ranks[1][meeting].step.is_receive());
    ranks[0][both].joined = false;
    ranks[1][meeting].joined = false;
    simulate(&P, &ranks, &Costs::default()).unwrap();
    ranks[1].swap(meeting, meeting + 1);
    let error = simulate(&P, &ranks, &Costs::default()).unwrap_err();
    assert!(
        error.to_string().ends_with("which waits for ever"),
        "{error}"
    );
    // One rank that does both at once is enough.
    ranks[1][meeting].joined = true;
    simulate(&P, &ranks, &Costs::default()).unwrap();
}

fn zeroed<T>() -> T {
    // SAFETY: the structs of the C ABI may be zero.
    unsafe { std::mem::zeroed() }
}

#[test]
fn the_c_functions_refuse() {
    let (mut p, mut summary): (unsloth_pipeline_schedule_params, unsloth_pipeline_summary) =
        (zeroed(), zeroed());
    p.struct_size = size_of_val(&p) as u32;
    summary.struct_size = size_of_val(&summary) as u32;
    (p.stages, p.micro_batches) = (2, 3);
    let mut actions: [unsloth_pipeline_action; 16] = zeroed();
    type Spoil = fn(&mut unsloth_pipeline_schedule_params);
    let cases: [(Spoil, &str); 6] = [
        (|p| p.kind = 4, "kind is 4, allowed: 0 to 3"),
        (|p| p.stages = -1, "stages is -1, at least 0 is needed"),
        (|p| p.rank = 2, "rank is 2, allowed: 0 to 1"),
        (|p| p.chunks = -1, "chunks is -1, at least 0 is needed"),
        (
            |p| p.micro_batches = -1,
            "micro_batches is -1, at least 0 is needed",
        ),
        (
            |p| p.micro_batches = 5,
            "capacity is 16, the rank has 20 actions",
        ),
    ];
    let mut call = |p: &unsloth_pipeline_schedule_params| {
        // SAFETY: the structs have the size that they state, and there is room for 16 actions.
        let status =
            unsafe { unsloth_pipeline_schedule(p, &mut summary, actions.as_mut_ptr(), 16) };
        (status, summary.num_actions, actions[0].step)
    };
    for (spoil, expected) in cases {
        let mut spoiled = p;
        spoil(&mut spoiled);
        let (status, num_actions, step) = call(&spoiled);
        let expected = format!("pipeline_schedule: {expected}");
        assert_fails(status, UNSLOTH_STATUS_INVALID_ARGUMENT, &expected);
        assert_eq!((num_actions, step), (0, 0), "written");
    }
    p.micro_batches = 2;
    let (status, num_actions, step) = call(&p);
    assert_eq!(
        (status, num_actions, step),
        (UNSLOTH_STATUS_SUCCESS, 8, UNSLOTH_PIPELINE_STEP_FORWARD)
    );
}

#[test]
fn the_simulation_in_c_refuses() {
    let (mut p, mut found): (
        unsloth_pipeline_simulate_params,
        unsloth_pipeline_simulation,
    ) = (zeroed(), zeroed());
    p.struct_size = size_of_val(&p) as u32;
    found.struct_size = size_of_val(&found) as u32;
    (p.stages, p.micro_batches, p.forward) = (2, 3, 1.0);
    let mut ranks: [unsloth_pipeline_rank_use; 2] = zeroed();
    type Spoil = fn(&mut unsloth_pipeline_simulate_params);
    let cases: [(Spoil, &str); 5] = [
        (|p| p.kind = 9, "kind is 9, allowed: 0 to 3"),
        (|p| p.overlap = 2, "overlap is 2, allowed: 0, 1"),
        (
            |p| p.transfer = -0.5,
            "transfer is -0.5, allowed: 0 to 1e18",
        ),
        (|p| p.stages = 3, "capacity is 2, stages is 3"),
        (|p| p.stages = 0, "stages is 0, allowed: 1 to 1024"),
    ];
    let mut call = |p: &unsloth_pipeline_simulate_params| {
        // SAFETY: the structs have the size that they state, and there is room for two ranks.
        let status = unsafe { unsloth_pipeline_simulate(p, &mut found, ranks.as_mut_ptr(), 2) };
        (status, found.time, ranks[0].busy, found.peak_live)
    };
    for (spoil, expected) in cases {
        let mut spoiled = p;
        spoil(&mut spoiled);
        let (status, time, busy, _) = call(&spoiled);
        let expected = format!("pipeline_simulate: {expected}");
        assert_fails(status, UNSLOTH_STATUS_INVALID_ARGUMENT, &expected);
        assert_eq!((time, busy), (0.0, 0.0), "written");
    }
    assert_eq!(call(&p), (UNSLOTH_STATUS_SUCCESS, 4.0, 3.0, 2));
}
