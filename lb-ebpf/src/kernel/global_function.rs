//! Global functions of a program: the verifier follows such a function once, for any arguments, and
//! not once per path that leads to it.

/// Defines a global function for each set of [`Instructions`](super::atomic::Instructions), both
/// with the same body, which is generic over the set. Also defines a function `$call` that calls
/// the global function for the caller's set.
macro_rules! global_function {
    (
        $(#[$about:meta])*
        $visibility:vis fn $call:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:ident,
        $new:ident, $old:ident;
    ) => {
        $(#[$about])*
        #[inline(always)]
        $visibility fn $call<I: $crate::kernel::atomic::Instructions>($($argument: $type),*) -> $result {
            // The condition is known at compile time.
            if I::CAN_FETCH { $new($($argument),*) } else { $old($($argument),*) }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $new($($argument: $type),*) -> $result {
            $body::<$crate::kernel::atomic::Linux5_12>($($argument),*)
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $old($($argument: $type),*) -> $result {
            $body::<$crate::kernel::atomic::Linux5_10>($($argument),*)
        }
    };
}
pub(crate) use global_function;
